"""What the tests of the real containers have in common: one running project."""

from collections.abc import Iterator

import pytest

from tests.compose.project import Project


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
