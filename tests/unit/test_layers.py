"""The house keeps its floors: a room imports only from below, no circle anywhere, no heavy library on the ground floor.

Imports are read from the sources (also those inside functions and under TYPE_CHECKING, which tie rooms together just
the same), so that nothing has to be importable here. The rules have negative controls: small sources that break them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUND = {"plan": 1, "evidence": 1}
FLOORS = {**GROUND, "kernels": 2, "model": 3, "train": 4, "rollout": 5, "driver": 6, "cli": 7, "__main__": 8}
# Besides lower floors, what a room may use of its own floor; and what it may not use although it lies below.
SAME_FLOOR = {("evidence", "plan")}
FORBIDDEN = {("rollout", "train"), ("kernels", "plan"), ("kernels", "evidence")}
# Third-party libraries of the ground floor; the rooms above may use what is installed.
_SCHEMAS = {"pydantic", "pydantic_core"}
LIBRARIES = {"plan": {*_SCHEMAS, "yaml"}, "evidence": {*_SCHEMAS, "numpy", "safetensors"}}


def modules() -> dict[str, Path]:
    """Every module of the project by name; kernels/ is rlk.kernels."""
    found = {}
    for base, package in ((ROOT / "rlk", "rlk"), (ROOT / "kernels", "rlk.kernels")):
        for path in sorted(base.rglob("*.py")):
            if package == "rlk" and "kernels" in path.relative_to(base).parts:
                continue  # the link
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def imports(source: str, module: str, *, package: bool) -> Iterator[str]:
    """What a module imports, as full dotted names; `from a import b` gives a.b."""
    parent = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parent[: len(parent) - node.level + 1]) if node.level else ""
            prefix = ".".join(part for part in (base, node.module) if part)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    """The room of a module of ours; None for the bare package and for libraries."""
    parts = name.split(".")
    if parts[0] != "rlk" or len(parts) == 1:
        return None
    return "cli" if parts[1].startswith("cli_") else parts[1]  # the roof is one room of several files


def floor_problem(module: str, imported: str) -> str | None:
    """Why a module may not import a name, or None."""
    own, other = room(module), room(imported)
    top = imported.split(".")[0]
    if own is None:
        return f"{module} may import nothing of ours" if other else None
    if own not in FLOORS:
        return f"{module} is on no floor"
    if other is None:
        allowed = LIBRARIES.get(own)
        known = allowed is None or top in allowed or top in sys.stdlib_module_names or top in ("rlk", "__future__")
        return None if known else f"{module} imports {top}, allowed are {sorted(allowed or ())}"
    if own == other or (own, other) in SAME_FLOOR:
        return None
    if other not in FLOORS or FLOORS[other] >= FLOORS[own] or (own, other) in FORBIDDEN:
        return f"{module} (floor {FLOORS[own]}) imports {imported} (floor {FLOORS.get(other)})"
    return None


def graph(sources: dict[str, str], packages: set[str]) -> dict[str, set[str]]:
    """Module to the modules of ours that it imports."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = set(imports(source, module, package=module in packages))
        names |= {name.rpartition(".")[0] for name in names if name not in sources}
        edges[module] = (names & sources.keys()) - {module}
    return edges


def circle(edges: dict[str, set[str]]) -> list[str] | None:
    """Some circle of imports, or None."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for other in sorted(edges[module]):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return None

    return next((found for module in sorted(edges) if (found := visit(module, []))), None)


MODULES = modules()
SOURCES = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def test_sources_of_the_ground_floor_are_found() -> None:
    assert {"rlk.plan.derive", "rlk.evidence.checks.registry", "rlk.kernels"} <= MODULES.keys()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_imports_only_from_floors_below(module: str) -> None:
    names = imports(SOURCES[module], module, package=module in PACKAGES)
    problems = [problem for name in names if (problem := floor_problem(module, name))]
    assert problems == []


def test_no_circle_among_the_modules() -> None:
    assert circle(graph(SOURCES, PACKAGES)) is None


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("rlk.plan.derive", "rlk.evidence.bits"),
        ("rlk.plan.derive", "torch"),
        ("rlk.plan.derive", "numpy"),
        ("rlk.evidence.validate", "torch.nn"),
        ("rlk.evidence.validate", "rlk.kernels.bits"),
        ("rlk.kernels.gemm", "rlk.plan.topology"),
        ("rlk.model.qwen3", "rlk.train.rank"),
        ("rlk.train.rank", "rlk.rollout.engine"),
        ("rlk.rollout.engine", "rlk.train.rank"),
        ("rlk.rollout.engine", "rlk.driver.run"),
        ("rlk.driver.run", "rlk.cli"),
        ("rlk.elsewhere.thing", "rlk.plan.derive"),
        ("rlk.driver.run", "rlk.elsewhere"),
    ],
)
def test_import_against_the_floors_is_found(module: str, imported: str) -> None:
    assert floor_problem(module, imported) is not None


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("rlk.evidence.plans", "rlk.plan.derive"),
        ("rlk.evidence.arrays", "numpy"),
        ("rlk.plan.derive", "dataclasses"),
        ("rlk.model.qwen3", "rlk.kernels.gemm"),
        ("rlk.rollout.engine", "vllm"),
        ("rlk.cli", "rlk.driver.run"),
    ],
)
def test_import_from_below_is_allowed(module: str, imported: str) -> None:
    assert floor_problem(module, imported) is None


def test_all_spellings_of_an_import_are_read() -> None:
    lines = ["import a.b", "from rlk.plan import derive", "from . import one", "from ..up import two"]
    source = "\n".join([*lines, "def f():", "    import late"])
    found = set(imports(source, "rlk.room.module", package=False))
    assert found == {"a.b", "rlk.plan.derive", "rlk.room.one", "rlk.up.two", "late"}


def test_circle_through_three_modules_is_found() -> None:
    sources = {"rlk.a": "import rlk.b", "rlk.b": "from rlk import c", "rlk.c": "def f():\n    from rlk.a import x"}
    assert circle(graph(sources, set())) == ["rlk.a", "rlk.b", "rlk.c", "rlk.a"]
    assert circle(graph({**sources, "rlk.c": "import json"}, set())) is None
