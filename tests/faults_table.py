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

_REST = "## Mutants"

HEAD = """# Faults on purpose

A check that cannot fail shows nothing. `rlk verify --inject NAME[@STEP]` breaks a run on purpose, in one step or in
all; only a test profile (`"test": true`, as tiny-cpu has) takes it without `--confirm-inject`. The manifest's notes
and the verdict name the fault, and the check `injected` keeps such a run from ever passing, whatever else is red. The
registry is `rlk/plan/faults.py`.

Written by the tests that apply every fault (`make faults`); a test holds that no fault lacks a row, that each is
caught by the checks that the registry names, and that this page is what the rows give. *One process*: two engines and
a trainer whose ranks are threads, in `tests/unit/one_process.py`, with the product's model, sampler, trainer and
validator. *Live engines*: Ray and vLLM. *Recorded run*: a finished record, changed and judged anew. A fault of the
rollout side acts in engine 0 alone; `both` in both engines alike, where equal bytes see nothing and only the
independent oracle does ([evidence.md](evidence.md)).

"""


@dataclass(frozen=True)
class Row:
    """One fault as one run applied it: the checks that were red, and where the first that it names failed."""

    name: str
    proof: str
    caught_by: tuple[str, ...]
    located: str


def row(fault: Fault, proof: str, verdict: Validation) -> Row:
    """The row of a verdict; the place is that of the first check that the registry names."""
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
        parts.append(" against ".join(sides))
    elif "difference begins after them" in check.message:
        parts.append("after the logits: sampling rules")
    return ", ".join(part for part in parts if part)


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
    rest = DOCUMENT.read_text(encoding="utf-8").partition(_REST)[2] if DOCUMENT.exists() else ""
    DOCUMENT.write_text(page(kept) + (f"\n{_REST}{rest}" if rest else ""), encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """The text of docs/faults.md up to the end of the table; what follows in the file is written by hand."""
    lines = ["| fault | what is done | acts in | applied to | red checks | located at |", "|---|---|---|---|---|---|"]
    for one in rows:
        fault = BY_NAME[one.name]
        checks = " ".join(f"`{name}`" for name in one.caught_by)
        lines.append(f"| `{one.name}` | {fault.sentence} | {fault.side} | {one.proof} | {checks} | {one.located} |")
    return f"{HEAD}{_summary(rows)}\n\n" + "\n".join(lines) + "\n"


def _summary(rows: Sequence[Row]) -> str:
    caught = {one.name for one in rows if set(BY_NAME[one.name].caught_by) <= set(one.caught_by)}
    one_side = [one for one in rows if one.proof == "one process" and BY_NAME[one.name].side != "both"]
    by_op = [one for one in one_side if " against " in one.located]
    after = [one for one in one_side if "after the logits" in one.located]
    sentences = (
        f"{len(caught)} of {len(FAULTS)} faults are caught.",
        f"Of the {len(one_side)} that break one side of a computation in one process, the probe locates {len(by_op)}",
        f"to op, rank and token (or atom), and {len(after)} to the token and the sampling rules, which come after the",
        "last op that it records.",
    )
    return "\n".join(sentences)
