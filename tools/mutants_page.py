"""docs/mutants.md from what a run of the mutants left: `docs/evidence/mutants.json`, and why survivors may survive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.mutant_reasons import REASONS

RESULTS = Path("docs/evidence/mutants.json")
DOCUMENT = Path("docs/mutants.md")
SCHEMA = "rlk.mutants/1"
HEAD = """# Mutants of the validator

Tests that do not notice a change of the validator would not notice a mistake in it. `make mutants` (not in CI) changes
`rlk/evidence` in one place at a time, with the operators of cosmic-ray, and runs the unit tests of the evidence that
execute the changed statement (found by one run under coverage), the nearest and fastest first, until one fails. A
change inside of functions is put into a process that has collected the tests already, in a child of its own; a change
of what runs at import is imported there, and meets the tests near its module as well: fields and constants are no lines
of a test. So a mutant costs what its tests cost. A run that was stopped goes on where it was, and one after a change of
the tests makes only those mutants again that survived, or whose module is another.
`make mutants ONLY=checks/oracle` takes one module, `ONLY=--all` every replacement.

- **Not made**: annotations, which `from __future__ import annotations` leaves unevaluated; of the eleven replacements
  of a binary operator ten, since a test that sees one sees the others; `is` in the place of `==`, which asks what
  objects Python shares.
- **Noticed**: a test failed, the changed module could not be imported, or a test ran for longer than a minute of CPU.
- **Survived**: every test that executes the statement passed, or the nearest of them where a number of tests stands
  beside it. Those that matter got a test (`tests/unit/test_evidence_*_edges.py` and their neighbours) or showed code
  that nothing could reach, which is gone; why the others may stay stands below (`tools/mutant_reasons.py`).
"""


@dataclass(frozen=True)
class Survivor:
    """A change that no test noticed: `tests` of the `of` that execute the statement were run."""

    module: str
    line: int
    change: str
    tests: int
    of: int

    @property
    def why(self) -> str | None:
        """Why it may stay, if that is known."""
        fits = (why for module, change, why in REASONS if module in self.module and re.search(change, self.change))
        return next(fits, None)


@dataclass(frozen=True)
class Module:
    """Counts of one module; `made` of its mutants were to be run, and `run` were."""

    module: str
    mutants: int
    made: int
    run: int
    noticed: int


def write(root: Path, modules: Sequence[Module], survivors: Sequence[Survivor]) -> None:
    """The results, and the page with them, in a tree."""
    body = {"schema": SCHEMA, "modules": [asdict(one) for one in modules], "survivors": [asdict(s) for s in survivors]}
    (root / RESULTS).write_text(f"{json.dumps(body, indent=1)}\n", encoding="utf-8")
    (root / DOCUMENT).write_text(page(modules, survivors), encoding="utf-8")


def read(root: Path) -> tuple[list[Module], list[Survivor]]:
    """The results of the last run."""
    body = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    return [Module(**one) for one in body["modules"]], [Survivor(**one) for one in body["survivors"]]


def page(modules: Sequence[Module], survivors: Sequence[Survivor]) -> str:
    """The text of docs/mutants.md."""
    return "\n".join(
        [HEAD, *_summary(modules, survivors), "", *_table(modules, survivors), "", *_groups(survivors), ""]
    )


def _summary(modules: Sequence[Module], survivors: Sequence[Survivor]) -> Iterator[str]:
    mutants, made, run, noticed = (sum(getattr(m, n) for m in modules) for n in ("mutants", "made", "run", "noticed"))
    explained = sum(1 for s in survivors if s.why)
    yield f"Of {mutants} mutants {made} were to be made and {run} were run:"
    yield f"**{noticed} noticed, {run - noticed} survived**, of which {explained} are explained."
    if run < made:
        yield f"{made - run} have not been run yet, or survived before tests were added and did not meet them."


def _table(modules: Sequence[Module], survivors: Sequence[Survivor]) -> Iterator[str]:
    yield "| module | mutants | to be made | run | noticed | survived | explained |"
    yield "|---|---|---|---|---|---|---|"
    for one in modules:
        explained = sum(1 for s in survivors if s.module == one.module and s.why)
        name = one.module.removeprefix("rlk/evidence/")
        counts = (one.mutants, one.made, one.run, one.noticed, one.run - one.noticed, explained)
        yield f"| `{name}` | {' | '.join(map(str, counts))} |"


def _groups(survivors: Sequence[Survivor]) -> Iterator[str]:
    reasons = list(dict.fromkeys(s.why for s in survivors if s.why))
    for why in (*reasons, None):
        own = [s for s in survivors if s.why == why]
        if own:
            yield f"**{len(own)}: {why or 'not explained yet.'}**"
            yield ""
            for s in own:
                before, _, after = s.change.partition(" => ")
                met = "" if s.tests == s.of else f" ({s.tests} of {s.of} tests)"
                yield f"- `{s.module.removeprefix('rlk/evidence/')}:{s.line}`{met} `{before}` → `{after}`"
            yield ""
