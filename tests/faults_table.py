"""docs/faults.md, written by the run that proves it: `make faults`. Rows live in docs/evidence/faults.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlk.evidence.verdict import Validation
from rlk.plan.faults import BY_NAME, FAULTS, Fault

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "docs" / "evidence" / "faults.json"
DOCUMENT = ROOT / "docs" / "faults.md"
SCHEMA = "rlk.faults/1"
_NEVER_COUNTED = {"injected", "verdict", "seal"}  # red for every fault alike: they do not see what was done
_MANY = 8  # red checks, above which they are counted
_AGAINST = " against "  # between the ranks of a place
UNPLACED = {
    "gradient-zeroed": "every train rank does the same, and no rank computes it twice",
    "lr-zero": "every train rank takes the same rate",
    "master-not-exported": "every train rank keeps its weights, and the engines get the same",
    "nan-on-one-rank": "the run stops in that step, and the manifest names the sample",
}
"""Faults of one side in which no two ranks compute different bits of one thing, and why."""

HEAD = """# Faults on purpose

A check that cannot fail shows nothing. `rlk verify --inject NAME[@STEP]` breaks a run on purpose, in one step or in
all; only a test profile (`"test": true`, as tiny-cpu has) takes it without `--confirm-inject`. The manifest's notes
and the verdict name the fault, and the check `injected` keeps such a run from ever passing, whatever else is red. The
registry is `rlk/plan/faults.py`; [evidence.md](evidence.md) says what each check reads, and what an op of the probe is.

This page is written by the tests that apply every fault (`make faults`; rows in `docs/evidence/faults.json`). A test
holds that no fault lacks a row, that each is caught by the checks that the registry names, that nine of ten are
located, and that this page is what the rows give. That tests notice changes of the validator's own code is shown in
[mutants.md](mutants.md).

- **Applied to.** *One process*: two engines and a trainer whose ranks are threads, in `tests/unit/one_process.py`, with
  the product's model, sampler, trainer and validator. *Live engines*: Ray and vLLM. *Recorded run*: a finished record,
  changed and judged anew.
- **Acts in.** A fault of the rollout side acts in engine 0 alone, one of the train side in the trainer alone. `both` is
  both sides alike, where equal bytes see nothing and only the independent oracle does; of a recorded run it is the
  record.
- **Located at.** All but the recorded runs are run with `--probe`: op, position, sample, token, and the ranks that have
  either word. Two owners of a row, one on each side, cannot outvote each other, so the place names both.

"""


@dataclass(frozen=True)
class Row:
    """One fault as one run applied it: the checks that were red, and where the first that it names failed."""

    name: str
    proof: str
    caught_by: tuple[str, ...]
    located: str


def row(fault: Fault, proof: str, verdict: Validation) -> Row:
    """The row of a verdict; the place is the probe's, else that of the first check that the registry names."""
    caught = tuple(c.name for c in verdict.checks if not c.passed and c.name not in _NEVER_COUNTED)
    return Row(fault.name, proof, caught, _located(fault, verdict))


def _located(fault: Fault, verdict: Validation) -> str:
    """What the probe says, where there is one and it saw a difference; else the place of the first check named."""
    check = verdict.check(fault.caught_by[0])
    probe = next((c.failure for c in verdict.checks if c.name == "probe"), None)
    failure = probe or check.failure
    if failure is None:
        return check.message
    parts = [failure.place, failure.where]
    if probe is not None and probe.left is not None and probe.right is not None:
        sides = sorted(side.source.split(", ")[0] for side in (probe.left, probe.right))
        parts.append(_AGAINST.join(sides))
    return ", ".join(part for part in parts if part)


def by_probe(row: Row) -> bool:
    """Whether the place names the ranks that differ, which only the probe does."""
    return _AGAINST in row.located


def one_sided(row: Row) -> bool:
    """Whether ranks computed something else than others: what a probe can see."""
    return BY_NAME[row.name].side != "both" and row.name not in UNPLACED


def read() -> list[Row]:
    """The rows of the last runs."""
    if not ROWS.exists():
        return []
    body = json.loads(ROWS.read_text(encoding="utf-8"))
    return [Row(**{**one, "caught_by": tuple(one["caught_by"])}) for one in body["rows"]]


def write(new: Sequence[Row]) -> None:
    """Puts new rows in the place of older ones of the same fault and proof, and the page with them."""
    rows = {(one.name, one.proof): one for one in (*read(), *new) if one.name in BY_NAME}
    order = [fault.name for fault in FAULTS]
    kept = sorted(rows.values(), key=lambda one: (order.index(one.name), one.proof))
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema": SCHEMA, "rows": [asdict(one) for one in kept]}
    ROWS.write_text(f"{json.dumps(body, indent=1)}\n", encoding="utf-8")
    DOCUMENT.write_text(page(kept), encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """The text of docs/faults.md."""
    lines = [
        "| fault | what is done | acts in | applied to | caught by | also red | located at |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        fault = BY_NAME[one.name]
        named = [f"`{name}`" for name in one.caught_by if name in fault.caught_by]
        others = [f"`{name}`" for name in one.caught_by if name not in fault.caught_by]
        also = " ".join(others) if len(others) <= _MANY else f"{len(others)} more: nothing could be read"
        cells = (f"`{one.name}`", fault.sentence, fault.side, one.proof, " ".join(named), also, one.located)
        lines.append(f"| {' | '.join(cells)} |")
    return f"{HEAD}{_summary(rows)}\n\n" + "\n".join(lines) + "\n"


def _summary(rows: Sequence[Row]) -> str:
    caught = {one.name for one in rows if set(BY_NAME[one.name].caught_by) <= set(one.caught_by)}
    seen = {one.name for one in rows if one_sided(one)}
    located = {one.name for one in rows if by_probe(one)}
    sentences = (
        f"**{len(caught)} of {len(FAULTS)} faults are caught.** Of the {len(seen)} in which some ranks compute",
        f"something else than others, the probe locates **{len(seen & located)}** to op, rank and token (or atom of",
        "the optimizer).",
        *(f"`{name}` has no such place: {reason}." for name, reason in UNPLACED.items()),
    )
    return "\n".join(sentences)
