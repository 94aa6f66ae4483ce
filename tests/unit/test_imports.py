"""The arrows between folders, what policy must not know, and how long files and functions may be."""

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("kernels", "common.engine", "common", "kvtransfer", "gateway", "prefill", "decode", "aggregated"),
    *("bench.inside", "bench.planning", "bench", "baton"),
)
"""`common.engine` before `common`, `bench.inside` before `bench`: the first that matches is a module's room."""

MAY_IMPORT = {
    "kernels": {"kernels"},
    "common": {"common"},
    "common.engine": {"common.engine", "common", "kernels"},
    "kvtransfer": {"kvtransfer", "common"},
    "gateway": {"gateway", "common"},
    "prefill": {"prefill", "kvtransfer", "common.engine", "common"},
    "decode": {"decode", "kvtransfer", "common.engine", "common"},
    "aggregated": {"aggregated", "prefill", "decode", "kvtransfer", "common.engine", "common"},
    "bench": {"bench", "common"},
    "bench.inside": {"bench.inside", "bench", "gateway", "decode", "kvtransfer", "common.engine", "common", "kernels"},
    "bench.planning": {
        *("bench.planning", "bench", "gateway", "prefill", "decode", "kvtransfer", "common.engine", "common"),
    },
    "baton": {"common", "gateway", "prefill", "decode", "aggregated", "bench", "bench.inside", "bench.planning"},
}
FOREIGN_TO = {room: {"torch", "transformers"} for room in ("common", "gateway", "bench", "bench.planning")}

POLICY = (
    "aggregated.service",
    "bench.figures",
    "bench.gateway_figures",
    "bench.goodput",
    "bench.interleave",
    "bench.measure",
    "bench.planning.planner",
    "bench.slo",
    "bench.sse",
    "bench.workload",
    "common.engine.block_manager",
    "common.engine.gateway_watch",
    "common.engine.leases",
    "common.engine.parallel",
    "common.engine.step",
    "common.engine.turn",
    "common.hang",
    "common.peers",
    "common.service",
    "decode.scheduler",
    "decode.service",
    "gateway.fleet",
    "gateway.life",
    "gateway.requests",
    "gateway.router",
    "kvtransfer.reshard",
    "prefill.scheduler",
    "prefill.service",
)
FOREIGN_TO_POLICY = {"torch", "zmq", "asyncio", "threading", "socket"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LINE_LEN = 120


def source_files() -> list[Path]:
    folders = sorted({room.partition(".")[0] for room in ROOMS if room != "baton"})
    return [ROOT / "baton.py", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def room(module: str) -> str | None:
    return next((name for name in ROOMS if module == name or module.startswith(name + ".")), None)


@cache
def find_file(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


@cache
def imported_modules(path: Path) -> list[str]:
    """Every module that is imported anywhere in the file; `from a import b` is `a.b` where that is a module."""
    modules: list[str] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            modules += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: relative import in line {node.lineno}"
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                modules.append(submodule if room(node.module) and find_file(submodule) else node.module)
    return modules


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    own_room = room(module_name(path))
    assert own_room is not None
    for module in imported_modules(path):
        target = room(module)
        assert target is None or target in MAY_IMPORT[own_room], f"{path} imports {module}"
        assert module.partition(".")[0] not in FOREIGN_TO.get(own_room, set()), f"{path} imports {module}"


@pytest.mark.parametrize("policy", POLICY)
def test_policy_knows_no_tensors_sockets_threads_or_loops(policy: str) -> None:
    reached, open_modules = {policy}, [policy]
    while open_modules:
        module = open_modules.pop()
        path = find_file(module)
        assert path is not None, f"{module} does not exist"
        for imported in imported_modules(path):
            assert imported.partition(".")[0] not in FOREIGN_TO_POLICY, f"{policy} reaches {imported} through {module}"
            if room(imported) and imported not in reached:
                reached.add(imported)
                open_modules.append(imported)


@pytest.mark.parametrize("path", [*source_files(), *sorted((ROOT / "tests").rglob("*.py"))], ids=module_name)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("src/*")), ids=lambda path: path.name)
def test_native_sources_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_FILE_LINES
    assert max(map(len, lines)) <= MAX_LINE_LEN


def test_the_kernels_package_is_a_docstring_only() -> None:
    """transformers looks for a package of this name and must find nothing in it that it would use."""
    (only,) = parsed(ROOT / "kernels" / "__init__.py").body
    assert isinstance(only, ast.Expr)
    assert isinstance(only.value, ast.Constant)


def test_every_folder_with_modules_is_installed() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in source_files() if path.parent != ROOT}
    assert set(setup["packages"]) == {".".join(folder.parts) for folder in folders}
    assert setup["package-data"]["kernels.cpu"] == ["src/*"], "the native ops are built from their sources"
