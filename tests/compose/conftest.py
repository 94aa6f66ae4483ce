"""What the tests of the real containers have in common: one running project, and a report of what was seen."""

from collections.abc import Iterator

import pytest

from tests.compose.project import Project

_SEEN = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> dict[str, str]:
    """Figures that are shown at the end, by what they are of."""
    return request.config.stash.setdefault(_SEEN, {})


@pytest.fixture(scope="session")
def project(seen: dict[str, str]) -> Iterator[Project]:
    """Built, started from nothing, and taken down with its volumes."""
    project = Project()
    project.build()
    seen["image"] = f"{project.image_bytes() / 1e9:.2f} GB"
    try:
        seen["from up to healthy"] = f"{project.up():.0f} s"
        yield project
    finally:
        project.down()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if seen := config.stash.get(_SEEN, {}):
        terminalreporter.section("seen")
        for what, figure in seen.items():
            terminalreporter.write_line(f"{what}: {figure}")
