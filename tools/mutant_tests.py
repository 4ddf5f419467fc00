"""Which tests run a statement of the validator, and do they notice when it is changed? Each mutant in a child process.

A mutant never touches a file. Where only bodies of functions changed, a child of a process that has collected all tests
puts the changed code into those functions: it costs what the tests cost. Whatever runs at import (a decorator, a
constant, a field of a class) needs a child that imports the changed text in the place of the module.
"""

from __future__ import annotations

import ast
import gc
import importlib.machinery
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

CPU_SECONDS = 60  # of one mutant: an endless loop is noticed too
BYTES = 8 << 30
NEAR = {
    "arrays": ("coverage",), "counts": ("metrics",), "element": ("probe", "compare"), "files": ("writer",),
    "layout": ("structure",), "locate": ("probe", "compare"), "parting": ("compare",), "place": ("probe", "compare"),
    "plans": ("structure",), "processes": ("structure", "settings"), "program": ("probe", "compare"),
    "ray_status": ("documents", "structure"), "record": ("structure", "coverage"), "resources": ("soak",),
    "samples": ("coverage",),
    "schemas": ("documents",), "tally": ("checks", "coverage"), "tensors": ("weights",), "trajectory": ("digest",),
    "validate": ("structure", "seal"), "verdict": ("seal",),
}  # fmt: skip
"""Where the tests of a module stand, if not in a file of its name."""
CLASSES = "tests/unit/test_evidence_frozen_edges.py"
"""Looks at classes without running a line of them."""
FEW = 25
_OPTIONS = ("-x", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest")
_OPTIONS += ("-o", "tmp_path_retention_policy=none")
_OPTIMIZED = 1  # set in the code of functions, not of classes and modules
Bodies = list[tuple[CodeType, CodeType]]


@dataclass(frozen=True)
class Tests:
    """What an unchanged run executed. `lines` maps a file and a line to tests ("" is import), `seconds` a test to its
    time."""

    lines: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]

    def of(self, module: str, line: int) -> tuple[list[str], list[str]]:
        """Tests that execute the statement of a line, for what runs at import those that execute anything of the
        module or stand in a file near it, since fields and constants are no lines of a test: first the module's own,
        the edges and a few fast ones, then the others, the fastest first."""
        executed, found = self.lines.get(module, {}), set[str]()
        if self.imported(module, line):
            found.update(*executed.values())
        for number in statement(module, line):
            found |= executed.get(number, frozenset())
        shared = {_file(test) for test in found if test and _shares(_file(test))}
        stem = Path(module).stem
        own = [f"_{name}.py" for name in (stem, *NEAR.get(stem, ()))]
        if self.imported(module, line):
            shared.add(CLASSES)
            shared |= {file for file in map(_file, self.seconds) if any(name in file for name in own)}
        found |= {test for test in self.seconds if _file(test) in shared}
        near = [*own, "_edges.py"]
        order = sorted(found - {""}, key=lambda test: (not any(n in test for n in near), self.seconds[test], test))
        first = sum(any(n in test for n in near) for test in order) + FEW
        return order[:first], order[first:]

    def imported(self, module: str, line: int) -> bool:
        """Whether the statement of a line runs while modules are imported."""
        executed = self.lines.get(module, {})
        return any("" in executed.get(number, ()) for number in statement(module, line))


def measured(files: Sequence[str], scratch: Path) -> Tests:
    """One run of all tests without a mutant, under coverage. Raises RuntimeError if one fails."""
    out = scratch / "tests.json"
    if child(lambda: _measure(files, scratch, out), cpu=3600):
        raise RuntimeError("a test fails without a mutant")
    said = json.loads(out.read_text(encoding="utf-8"))
    lines = {m: {int(line): frozenset(tests) for line, tests in found.items()} for m, found in said["lines"].items()}
    return Tests(lines, said["seconds"])


def child(work: Callable[[], int], cpu: int = CPU_SECONDS, *, quiet: bool = True) -> int:
    """The exit status of work in a child of this process; a signal is negative."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        if quiet:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        code = work()
    finally:
        os._exit(code)


def with_import(module: str, text: str, tests: Sequence[str], scratch: Path) -> bool:
    """Whether all of these tests pass where another text of a module is imported. This process must not have
    imported it."""

    def run() -> int:
        sys.meta_path.insert(0, _Changed(module, text))
        return _pytest(tests, scratch)

    return child(run) == 0


class Collected:
    """All tests, collected in this process: a pytest plugin whose loop is `work`."""

    def __init__(self, files: Sequence[str], scratch: Path, work: Callable[[Collected], None]) -> None:
        self._items: dict[str, Any] = {}
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        self._work = work
        _pytest(files, scratch, self)

    def pytest_runtestloop(self, session: Any) -> bool:
        """Instead of running the tests."""
        self._items = {item.nodeid: item for item in session.items}
        for found in gc.get_objects():
            if isinstance(found, FunctionType):
                self._functions.setdefault(_place(found.__code__), []).append(found)
        gc.freeze()
        self._work(self)
        return True

    def with_bodies(self, bodies: Bodies, tests: Sequence[str]) -> bool:
        """Whether all of these tests pass with other code in some functions. Raises KeyError for a function that is
        not there."""
        pairs = [(function, after) for before, after in bodies for function in self._functions[_place(before)]]

        def run() -> int:
            from _pytest.runner import runtestprotocol

            for function, code in pairs:
                function.__code__ = code
            items = [self._items[test] for test in tests]
            for item, following in zip(items, [*items[1:], None], strict=True):
                if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                    return 1
            return 0

        return child(run) == 0


def bodies(path: str, before: str, after: str) -> Bodies | None:
    """The functions whose code differs between two texts of a module; None where anything else does."""
    place = str(Path(path).resolve())
    pair = (compile(text, place, "exec", dont_inherit=True) for text in (before, after))
    try:
        return list(_differing(*pair))
    except (_RunsAtImportError, SyntaxError):
        return None


class _RunsAtImportError(Exception):
    pass


def _differing(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    if before == after:
        return
    if before.co_flags & _OPTIMIZED:
        yield before, after
        return
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (before, after)]
    if _shell(before) != _shell(after) or len(inner[0]) != len(inner[1]):
        raise _RunsAtImportError
    for pair in zip(*inner, strict=True):
        yield from _differing(*pair)


def _shell(code: CodeType) -> tuple[Any, ...]:
    """What a module's or a class's own code does, without the functions that it makes."""
    constants = [c.co_name if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _pytest(tests: Sequence[str], scratch: Path, *plugins: object) -> int:
    import pytest

    return int(pytest.main([*_OPTIONS, f"--basetemp={scratch / 'tmp'}", *tests], plugins=list(plugins)))


class _Changed(importlib.machinery.SourceFileLoader):
    """Finds and loads one module from another text."""

    def __init__(self, module: str, text: str) -> None:
        super().__init__(module.removesuffix(".py").replace("/", "."), str(Path(module).resolve()))
        self.text = text

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """See importlib.abc.MetaPathFinder."""
        return importlib.util.spec_from_loader(name, self, origin=self.path) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        """See importlib.abc.Loader; never from a cache."""
        return self.source_to_code(self.text.encode(), self.path)


class _Watch:
    """Tells the coverage whose lines come, and keeps each test's time."""

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.seconds = coverage, dict[str, float]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def _measure(files: Sequence[str], scratch: Path, out: Path) -> int:
    from coverage import Coverage

    coverage = Coverage(data_file=None, include=["rlk/evidence/*"], config_file=False)
    coverage.start()
    watch = _Watch(coverage)
    code = _pytest(files, scratch, watch)
    coverage.stop()
    data, root = coverage.get_data(), Path.cwd()
    lines = {str(Path(f).relative_to(root)): data.contexts_by_lineno(f) for f in data.measured_files()}
    out.write_text(json.dumps({"lines": lines, "seconds": watch.seconds}), encoding="utf-8")
    return code


def _file(test: str) -> str:
    return test.partition("::")[0]


@cache
def _shares(file: str) -> bool:
    """Whether tests of a file share fixtures: lines that run for the first of them run for all."""
    return "scope=" in Path(file).read_text(encoding="utf-8")


@cache
def statement(module: str, line: int) -> range:
    """The lines of the innermost statement around a line, of a compound one its head."""
    best, size = range(line, line + 1), sys.maxsize
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if first <= line <= last and last - first < size:
                best, size = range(first, last + 1), last - first
    return best


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(Path(module).read_text(encoding="utf-8"))
