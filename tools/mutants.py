"""Mutation testing of the validator: cosmic-ray's changes of rlk/evidence, each against the unit tests that run it.

A survivor is a change of the code that no test notices. Survivors that matter get a test; the others are explained, and
docs/mutants.md says what came out. Run by `make mutants`; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutants"
SESSION = "session.sqlite"
TESTS = tuple(f"tests/unit/test_{name}.py" for name in ("evidence_*", "oracle", "matrix*", "soak*"))
_OTHER = {
    "Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "FloorDiv": "Mul", "Mod": "Mul", "Pow": "Mul",
    "LShift": "RShift", "RShift": "LShift", "BitAnd": "BitOr", "BitOr": "BitAnd", "BitXor": "BitAnd",
}  # fmt: skip
"""Of the eleven replacements that cosmic-ray makes of a binary operator the one that is made here: a test that sees
one sees the others. `--all` makes them all."""
LAST = "checks/causes.py"
"""A remark beside a verdict and never a part of it: its mutants come last."""

sys.path.insert(0, str(ROOT))
from tools import mutant_tests, mutants_page  # noqa: E402 - a script's own folder is not the root

sys.path[0] = str(COPY)


def main() -> int:
    """Runs the mutants that have no result yet; 0 even with survivors, since a person judges them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="parts of module names; all without one")
    parser.add_argument("--seconds", type=float, default=36000.0, help="limit for the run")
    parser.add_argument("--all", action="store_true", help="every replacement of an operator")
    parser.add_argument("--report", action="store_true", help="only write the page of what was run")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    asked = parser.parse_args()
    if asked.report:
        os.chdir(COPY)
        _report()
        return 0
    known = {} if asked.fresh or not (COPY / SESSION).exists() else _noticed()
    _copy()
    os.chdir(COPY)
    _begin(known)
    _import_libraries()
    until = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        _Run(asked.modules, until, Path(scratch), every=asked.all).all()
    _report()
    return 0


def _report() -> None:
    """docs/mutants.md of the tree that the run was started in."""
    with use_db(SESSION, WorkDB.Mode.open) as found:
        every = [item.mutations[0] for item in found.work_items]
        results = {_key(item.mutations[0]): (item.mutations[0], result) for item, result in found.completed_work_items}
    modules, survivors = [], []
    for name in sorted({str(m.module_path) for m in every}):
        own = [m for m in every if str(m.module_path) == name]
        done = [results[_key(m)] for m in own if _key(m) in results]
        ran = [(m, result) for m, result in done if result.worker_outcome == WorkerOutcome.NORMAL]
        lived = [(m, result) for m, result in ran if result.test_outcome == TestOutcome.SURVIVED]
        skipped = sum(1 for _, result in done if result.worker_outcome == WorkerOutcome.SKIPPED)
        made = sum(1 for m in own if worth_it(m.operator_name) or _key(m) in results) - skipped
        modules.append(mutants_page.Module(name, len(own), made, len(ran), len(ran) - len(lived)))
        for m, result in sorted(lived, key=lambda one: one[0].start_pos):
            _, tests, _, of, _ = (result.output or "").split()
            survivors.append(mutants_page.Survivor(name, m.start_pos[0], result.diff or "", int(tests), int(of)))
    mutants_page.write(ROOT, modules, survivors)


def _copy() -> None:
    """The tree as it is now, so that work may go on beside a long run."""
    shutil.rmtree(COPY, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "__pycache__", "*.safetensors")
    shutil.copytree(ROOT, COPY, symlinks=True, ignore=skipped)


def _key(mutation: MutationSpec) -> tuple[str, str, int]:
    return str(mutation.module_path), mutation.operator_name, mutation.occurrence


def _noticed() -> dict[tuple[str, str, int], WorkResult]:
    """Mutants of the last run that a test noticed or nothing could, of modules that have not changed since: more tests
    cannot change that."""
    with use_db(COPY / SESSION, WorkDB.Mode.open) as found:
        pairs = [(item.mutations[0], result) for item, result in found.completed_work_items]
    same = {m for m in {str(mutation.module_path) for mutation, _ in pairs} if _text(COPY / m) == _text(ROOT / m)}
    return {
        _key(mutation): result
        for mutation, result in pairs
        if str(mutation.module_path) in same and result.test_outcome != TestOutcome.SURVIVED
    }


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _begin(known: dict[tuple[str, str, int], WorkResult]) -> None:
    with use_db(SESSION, WorkDB.Mode.create) as found:
        init(sorted(Path("rlk/evidence").rglob("*.py")), found, {})
        for item in found.pending_work_items:
            if _key(item.mutations[0]) in known:
                found.set_result(item.job_id, known[_key(item.mutations[0])])


def _import_libraries() -> None:
    """What every child needs and no mutant changes."""
    import numpy
    import pydantic
    import pytest
    import safetensors.numpy
    import yaml

    from rlk.plan import cells, derive, faults, profile, resolve

    _ = numpy, pydantic, pytest, safetensors, yaml, cells, derive, faults, profile, resolve
    if any(name.startswith("rlk.evidence") for name in sys.modules):
        raise RuntimeError("rlk.plan imports rlk.evidence: a mutant would not be seen")


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    item: WorkItem
    mutation: MutationSpec
    before: str
    after: str

    @property
    def module(self) -> str:
        """The file."""
        return str(self.mutation.module_path)

    @property
    def line(self) -> int:
        """Where the change begins."""
        return int(self.mutation.start_pos[0])

    @property
    def sentence(self) -> str:
        """The first line that differs, before and after."""
        pairs = zip(self.before.splitlines(), self.after.splitlines(), strict=False)
        return next((f"{a.strip()} => {b.strip()}" for a, b in pairs if a != b), "")


Passes = Callable[[Mutant, Sequence[str]], bool]


class _Run:
    """The mutants of some modules, until time is up."""

    def __init__(self, words: Sequence[str], until: float, scratch: Path, *, every: bool) -> None:
        self.part, self.every = 0, every
        self.words, self.until, self.scratch = words, until, scratch
        self.files = [str(path) for pattern in TESTS for path in sorted(Path().glob(pattern))]
        self.tests = mutant_tests.measured(self.files, scratch)
        self._say(f"{len(self.tests.seconds)} tests take {sum(self.tests.seconds.values()):.0f} s")

    def all(self) -> None:
        """Every mutant meets a few tests, then the survivors meet the others."""
        for self.part in (0, 1):
            # Bodies of functions, in a process that has collected the tests; then what runs at import.
            mutant_tests.child(self._bodies, cpu=1 << 20, quiet=False)
            self._each(self._imports)

    def _bodies(self) -> int:
        mutant_tests.Collected(
            self.files, self.scratch, lambda collected: self._each(lambda m: self._body(m, collected))
        )
        return 0

    def _body(self, mutant: Mutant, collected: object) -> WorkResult | None:
        if _same_program(mutant):
            return WorkResult(WorkerOutcome.SKIPPED, output="an annotation that is never evaluated")
        changed = mutant_tests.bodies(mutant.module, mutant.before, mutant.after)
        if changed is None or self.tests.imported(mutant.module, mutant.line):
            return None
        return self._judge(mutant, lambda tests: collected.with_bodies(changed, tests))

    def _imports(self, mutant: Mutant) -> WorkResult:
        return self._judge(
            mutant, lambda tests: mutant_tests.with_import(mutant.module, mutant.after, tests, self.scratch)
        )

    def _judge(self, mutant: Mutant, passes: Callable[[Sequence[str]], bool]) -> WorkResult:
        tests = self.tests.of(mutant.module, mutant.line)
        part, total = tests[self.part], len(tests[0]) + len(tests[1])
        outcome = TestOutcome.SURVIVED if not part or passes(part) else TestOutcome.KILLED
        met = len(part) if self.part == 0 else total
        if outcome == TestOutcome.SURVIVED:
            self._say(f"survived {met} of {total} tests: {mutant.module}:{mutant.line}: {mutant.sentence}")
        return WorkResult(WorkerOutcome.NORMAL, f"met {met} of {total} tests", outcome, mutant.sentence)

    def _each(self, judge: Callable[[Mutant], WorkResult | None]) -> None:
        with use_db(SESSION, WorkDB.Mode.open) as found:
            pending = [(item, item.mutations[0]) for item in self._open(found)]
            pending = [one for one in pending if self._asked(one[1])]
            self._say(f"{len(pending)} mutants have no result yet")
            parents = {os.getppid()}
            for item, mutation in pending:
                if time.monotonic() > self.until or os.getppid() not in parents:
                    self._say("stopped: the next run goes on here")
                    return
                result = judge(_mutant(item, mutation))
                if result is not None:
                    found.set_result(item.job_id, result)

    def _open(self, found: WorkDB) -> list[WorkItem]:
        """What has no result yet; then what survived without having met all tests, last what is explained."""
        if self.part == 0:
            return sorted(found.pending_work_items, key=_order)
        half = [one for one in found.completed_work_items if _half_done(one[1])]
        return [item for item, _ in sorted(half, key=lambda one: (_explained(*one), _order(one[0])))]

    def _asked(self, mutation: MutationSpec) -> bool:
        named = not self.words or any(word in str(mutation.module_path) for word in self.words)
        return named and (self.every or worth_it(mutation.operator_name))

    def _say(self, sentence: str) -> None:
        sys.stderr.write(f"{sentence}\n")


def worth_it(operator: str) -> bool:
    """Whether a mutant of this operator asks something that no other one asks; of `is` for `==`, what it says depends
    on which objects Python shares."""
    kind, _, change = operator.rpartition("/")[2].partition("_")
    before, _, after = change.partition("_")
    if kind == "ReplaceBinaryOperator":
        return _OTHER[before] == after
    return not (kind == "ReplaceComparisonOperator" and not before.startswith("Is") and after.startswith("Is"))


def _explained(item: WorkItem, result: WorkResult) -> bool:
    module = str(item.mutations[0].module_path)
    return mutants_page.Survivor(module, 0, result.diff or "", 0, 0).why is not None


def _order(item: WorkItem) -> tuple[object, ...]:
    mutation = item.mutations[0]
    module = str(mutation.module_path)
    first = "checks/" in module and not module.endswith(LAST)
    return not first, module.endswith(LAST), module, mutation.start_pos, mutation.operator_name


def _half_done(result: WorkResult) -> bool:
    met = (result.output or "").split()
    return result.test_outcome == TestOutcome.SURVIVED and met[1] != met[3]


def _mutant(item: WorkItem, mutation: MutationSpec) -> Mutant:
    source = Path(mutation.module_path).read_text(encoding="utf-8")
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    return Mutant(item, mutation, source, mutate_code(source, operator, mutation.occurrence) or source)


class _NoAnnotations(ast.NodeTransformer):
    """Removes what `from __future__ import annotations` leaves unevaluated. Fields of a class stay: pydantic reads
    them."""

    fields = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._within(node, fields=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            arg.annotation = None
        return self._within(node, fields=False)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not self.fields:
            node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def _within(self, node: ast.AST, *, fields: bool) -> ast.AST:
        before, self.fields = self.fields, fields
        try:
            return self.generic_visit(node)
        finally:
            self.fields = before


def _same_program(mutant: Mutant) -> bool:
    try:
        before, after = (ast.dump(_NoAnnotations().visit(ast.parse(text))) for text in (mutant.before, mutant.after))
    except SyntaxError:
        return False
    return before == after


if __name__ == "__main__":
    sys.exit(main())
