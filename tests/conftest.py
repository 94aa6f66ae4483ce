"""What holds for every test, some of it set before anything is imported that reads it."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Threads of two processes that spin for each other on the same cores cost minutes. Who wants a second one asks for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Triton reads it when it is imported first, which transformers does: kernels are run by its interpreter, without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long it takes to draw an example says something of the machine and of who else uses it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_SEEN = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> dict[str, str]:
    """Figures that tests of the real thing show at the end of the run, by what they are of."""
    return request.config.stash.setdefault(_SEEN, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if figures := config.stash.get(_SEEN, {}):
        terminalreporter.section("seen")
        for what, figure in figures.items():
            terminalreporter.write_line(f"{what}: {figure}")
