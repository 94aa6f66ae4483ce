"""Builds the C++ sources for an instruction level, once per machine, and keeps the result in a cache.

`python -m kernels.cpu.build` builds all levels into the package, for an image in which there is no compiler.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
UNITS = ("blocks.cpp", "pool.cpp")

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
"""Compiler flags of each instruction level, best first. portable is what every CPU of the architecture has."""

_CPU_FLAGS = {
    "amx": {"avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "portable": set[str](),
}
"""What the kernel must say of the CPU for each level."""

# GCC 12 warns about its own AVX-512 header.
_WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread", *_WARNINGS)


class BuildError(Exception):
    """There is no compiler, or it failed; says which and why."""


def cpu_levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The levels that this CPU has, best first. `amx` also needs the system's leave; see library.py."""
    flags = _read_cpu_flags(cpuinfo) if platform.machine() == "x86_64" else set[str]()
    return [level for level, needed in _CPU_FLAGS.items() if needed <= flags]


def _read_cpu_flags(cpuinfo: Path) -> set[str]:
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()


def build(level: str) -> Path:
    """Return the library of this level, building it if no earlier build of the same sources is here or cached.

    Some ten seconds the first time. Several processes may ask at once: one builds, the others wait.
    Raises: BuildError.
    """
    flags = (*_FLAGS, *LEVELS[level])
    prebuilt = _prebuilt(level, flags)
    if prebuilt.exists():
        return prebuilt
    compiler = _find_compiler()
    library = _cache_folder() / f"{level}-{_fingerprint(_version(compiler), flags)}.so"
    if library.exists():
        return library
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, flags, library)
    return library


def prebuild() -> list[Path]:
    """Build every level of this architecture into the package, also those that this machine cannot run.

    Raises: BuildError.
    """
    compiler = _find_compiler()
    PREBUILT.mkdir(exist_ok=True)
    libraries: list[Path] = []
    for level, level_flags in LEVELS.items():
        if level == "portable" or platform.machine() == "x86_64":
            flags = (*_FLAGS, *level_flags)
            libraries.append(_prebuilt(level, flags))
            _compile(compiler, flags, libraries[-1])
    return libraries


def _prebuilt(level: str, flags: tuple[str, ...]) -> Path:
    """Where it is, if these very sources were built there, by whichever compiler."""
    return PREBUILT / f"{level}-{_fingerprint(b'', flags)}.so"


def _find_compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler: neither CXX nor c++, g++ or clang++ on the PATH")
    return compiler


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(base) / "baton" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    raise BuildError(f"the cache folder {folder} cannot be written; XDG_CACHE_HOME names another place")


def _version(compiler: str) -> bytes:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the C++ compiler {compiler} does not run: {error}") from error


def _fingerprint(compiler_version: bytes, flags: tuple[str, ...]) -> str:
    """Of all that the result depends on."""
    digest = hashlib.sha256(compiler_version)
    digest.update(" ".join(flags).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *flags, "-o", str(built), *(str(SOURCES / unit) for unit in UNITS)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")
        built.rename(library)


if __name__ == "__main__":
    for built in prebuild():
        sys.stdout.write(f"{built}\n")
