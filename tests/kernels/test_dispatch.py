"""Which ops are chosen, and what is said where the native ones cannot be had."""

import logging
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu import build as build_module
from kernels.cpu.build import LEVELS, BuildError, build, cpu_levels, prebuild
from kernels.cpu.cores import private_cores
from kernels.cpu.library import load_library
from kernels.dispatch import OpsRequest, choose_ops

REQUEST = OpsRequest(dtype=torch.float32, head_dim=64, block_size=16)
WRITE_RESULT = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done; exit 0'
"""The end of a compiler that makes an empty file of what it is told to write."""
ODD = OpsRequest(dtype=torch.float32, head_dim=8, block_size=16)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no library that was loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    yield tmp_path
    load_library.cache_clear()


def make_compiler(folder: Path, script: str) -> str:
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return str(compiler)


def test_auto_is_native_where_that_works_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_ops("auto", REQUEST, private_cores(1)).name.startswith("cpu (")
    assert not caplog.records


def test_reference_can_be_asked_for() -> None:
    assert choose_ops("reference", REQUEST, private_cores(1)).name == "reference"


def test_auto_falls_back_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_ops("auto", ODD, private_cores(1)).name == "reference"
    assert "head_dim must be a multiple of 16" in caplog.text


def test_native_ops_that_were_asked_for_are_not_replaced() -> None:
    with pytest.raises(ValueError, match="kernels cpu: head_dim must be"):
        choose_ops("cpu", ODD, private_cores(1))


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"kernels must be one of auto, cpu, triton, reference, got 'metal'"):
        choose_ops("metal", REQUEST, private_cores(1))


def test_ops_of_another_device_are_refused() -> None:
    on_gpu = replace(REQUEST, device=torch.device("cuda:0"))
    with pytest.raises(ValueError, match="kernels cpu: they compute on a CPU, not on cuda:0"):
        choose_ops("cpu", on_gpu, private_cores(1))


def test_without_triton_a_gpu_has_the_reference_ops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kernels.triton.ops", None)
    on_gpu = replace(REQUEST, device=torch.device("cuda:0"))
    with caplog.at_level(logging.WARNING):
        assert choose_ops("auto", on_gpu, private_cores(1)).name == "reference"
    assert "Triton cannot be imported, the extra `gpu` brings it" in caplog.text
    with pytest.raises(ValueError, match="kernels triton: Triton cannot be imported"):
        choose_ops("triton", on_gpu, private_cores(1))


def test_without_a_compiler_the_reference_ops_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert choose_ops("auto", REQUEST, private_cores(1)).name == "reference"
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", make_compiler(cache, '[ "$1" = --version ] || { echo "out of luck" >&2; exit 1; }'))
    with pytest.raises(BuildError, match="out of luck"):
        build("portable")
    assert not list((cache / "baton" / "kernels").glob("*.so"))


def test_a_library_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = cache / "count"
    script = f'[ "$1" = --version ] || echo x >> {count}; {WRITE_RESULT}'
    monkeypatch.setenv("CXX", make_compiler(cache, script))
    assert build("portable") == build("portable")
    assert count.read_text() == "x\n"


def test_changed_sources_are_built_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", make_compiler(cache, WRITE_RESULT))
    sources = cache / "src"
    sources.mkdir()
    (sources / "blocks.cpp").write_text("1")
    monkeypatch.setattr(build_module, "SOURCES", sources)
    first = build("portable")
    (sources / "blocks.cpp").write_text("2")
    assert build("portable") != first


def test_what_was_built_into_the_package_needs_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "PREBUILT", cache / "prebuilt")
    monkeypatch.setenv("CXX", make_compiler(cache, WRITE_RESULT))
    libraries = prebuild()
    assert len(libraries) == (len(LEVELS) if os.uname().machine == "x86_64" else 1)
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX")
    assert build("portable") == libraries[-1]


def test_what_was_built_of_other_sources_is_not_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "PREBUILT", cache / "prebuilt")
    monkeypatch.setenv("CXX", make_compiler(cache, WRITE_RESULT))
    libraries = prebuild()
    sources = cache / "src"
    sources.mkdir()
    (sources / "blocks.cpp").write_text("1")
    monkeypatch.setattr(build_module, "SOURCES", sources)
    assert build("portable") not in libraries


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        build("portable")


def test_levels_are_read_from_the_kernels_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 fma f16c bmi2 avx512f\n")
    if os.uname().machine == "x86_64":
        assert cpu_levels(cpuinfo) == ["avx2", "portable"]
    assert cpu_levels(Path("/proc/cpuinfo"))[-1] == "portable"
