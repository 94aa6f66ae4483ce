"""The compose files for GPUs: what they change of compose.yaml, and what of it the Dockerfile knows."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKERS = ("prefill", "decode")
BUILDS = {"compose.gpu.yaml": "cuda", "compose.rocm.yaml": "hip"}
"""Which build of PyTorch is wanted, by its name in torch.version."""


def services(file: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / file).read_text())["services"]


@pytest.mark.parametrize("file", BUILDS)
def test_an_override_changes_services_of_the_compose_file_it_goes_on_top_of(file: str) -> None:
    assert services(file).keys() == services("compose.yaml").keys()
    assert f"docker compose -f compose.yaml -f {file} up" in (ROOT / file).read_text()


@pytest.mark.parametrize("file", BUILDS)
def test_all_services_run_the_image_that_is_built_for_the_gpus(file: str) -> None:
    (image,) = {service["image"] for service in services(file).values()}
    assert image != services("compose.yaml")["gateway"]["image"], "it must not replace the image for CPUs"
    (build,) = (service["build"] for service in services(file).values() if "build" in service)
    assert build["args"]["GPU"] == BUILDS[file]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert build["args"].keys() <= set(re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE))
    assert "getattr(torch.version, '$GPU')" in dockerfile, "another build of PyTorch must fail"


def test_workers_are_given_every_nvidia_gpu_and_gateways_none() -> None:
    changed = services("compose.gpu.yaml")
    for worker in WORKERS:
        reservations = changed[worker]["deploy"]["resources"]["reservations"]
        assert reservations == {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
    assert "deploy" not in changed["gateway"]


def test_workers_are_given_every_amd_gpu_and_may_open_it_and_gateways_none() -> None:
    changed = services("compose.rocm.yaml")
    for worker in WORKERS:
        assert changed[worker]["devices"] == ["/dev/kfd", "/dev/dri"]
        video, render = changed[worker]["group_add"]
        assert video == "video"
        assert render.startswith("${BATON_RENDER_GID:?"), "the group has no name in the image, and no common number"
    assert "devices" not in changed["gateway"]


@pytest.mark.parametrize("file", BUILDS)
def test_variables_of_the_overrides_are_in_the_example_or_in_the_compose_file(file: str) -> None:
    known = (ROOT / ".env.example").read_text() + (ROOT / "compose.yaml").read_text()
    assert all(variable in known for variable in re.findall(r"\$\{(\w+)", (ROOT / file).read_text()))
