"""docs/matrix.md, made of the matrix and its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rlk.evidence.matrix import CellRecord, MatrixEvidence
from rlk.plan.matrix import MatrixCell

HEAD = """# The matrix

Every train topology times every rollout topology, under every sampling setting: does the same run come out? Written by
`make matrix` from [evidence/{name}](evidence/{name}); a test holds that no topology is left out of either. Cells are in
`matrices/topologies.yaml` and `matrices/sampling.yaml`.

**Run** cells ran end to end: real vLLM engines, a real trainer, so many updates of the weights, and every check of
[evidence.md](evidence.md). **Composed** cells follow from two that ran. A trainer sees tokens, log-probabilities and
rewards only, and an engine weights only. One row of pairs (train TP 8, every rollout topology) and one column (rollout
TP 1, every train topology) ran with equal digests; a digest is chained over the tokens, log-probabilities, rewards,
advantages, gradients, masters, moments and weights of every step. So at each step every rollout topology made equal
tokens from equal weights, and every train topology equal weights from equal tokens; a pair that did not run itself,
then, has equal weights at the first step, hence equal tokens, hence equal weights at the next. The file names both
sources of each.

"""


def write(path: Path, cells: Sequence[MatrixCell], evidence: MatrixEvidence) -> None:
    """Writes the page."""
    path.write_text(page(cells, evidence), encoding="utf-8")


def page(cells: Sequence[MatrixCell], evidence: MatrixEvidence, name: str = "matrix-cpu.json") -> str:
    """The page's text."""
    tokens, bad = sum(one.tokens for one in evidence.cells), sum(one.mismatches for one in evidence.cells)
    ran = sum(one.how == "run" for one in evidence.cells)
    total = (
        f"{len(evidence.cells)} of {len(cells)} cells, {ran} of them run, {tokens:,} tokens compared, {bad} mismatches."
    )
    return HEAD.format(name=name) + total + "\n\n" + _settings(cells, evidence) + "\n" + _pairs(cells, evidence)


def _settings(cells: Sequence[MatrixCell], evidence: MatrixEvidence) -> str:
    rows = [
        "| sampling | updates | run | composed | tokens compared | mismatches | digest of all |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(cell.sampling for cell in cells):
        own = [one for one in evidence.cells if one.sampling == name]
        planned = next(cell.plan.config.steps for cell in cells if cell.sampling == name)
        run = [one for one in own if one.how == "run"]
        digests = {one.digest for one in own}
        digest = f"`{digests.pop()[:16]}`" if len(digests) == 1 and None not in digests else f"{len(digests)} digests"
        compared, bad = sum(one.tokens for one in own), sum(one.mismatches for one in own)
        rows.append(f"| {name} | {planned} | {len(run)} | {len(own) - len(run)} | {compared:,} | {bad} | {digest} |")
    return "\n".join(rows) + "\n"


def _pairs(cells: Sequence[MatrixCell], evidence: MatrixEvidence) -> str:
    """Rollout topologies down, train topologies across."""
    trains = list(dict.fromkeys(cell.plan.train for cell in cells))
    rollouts = list(dict.fromkeys(cell.plan.rollout for cell in cells))
    lines = [
        "Settings that agree, of each pair:\n",
        "| rollout | " + " | ".join(f"train TP {t.tp} CP {t.cp}" for t in trains) + " |",
    ]
    lines.append("|---" * (len(trains) + 1) + "|")
    for r in rollouts:
        row = [_pair(one for one in evidence.cells if _of(one) == (t.tp, t.cp, r.tp, r.cp)) for t in trains]
        lines.append(f"| TP {r.tp} CP {r.cp} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _of(one: CellRecord) -> tuple[int, int, int, int]:
    return one.train_tp, one.train_cp, one.rollout_tp, one.rollout_cp


def _pair(own: Iterable[CellRecord]) -> str:
    found = list(own)
    ran = [one for one in found if one.how == "run"]
    good = sum(one.passed for one in found)
    return f"{good}, {len(ran)} run in {sum(one.seconds for one in ran):.0f} s" if found else "none"


COSTS = """# Eight GPUs

The cells of `matrices/h100.yaml` as `make h100` ran them, with what each cost beside the same cell with ordinary
operators (native), from [evidence/{name}](evidence/{name}). {total}

| cell | steps | tokens | mismatches | digest | seconds a step | native mismatches | native seconds a step | a rank |
|---|---|---|---|---|---|---|---|---|
"""


def write_costs(path: Path, cells: Sequence[MatrixCell], evidence: MatrixEvidence, name: str) -> None:
    """Writes the page of a flat list."""
    path.write_text(costs(cells, evidence, name), encoding="utf-8")


def costs(cells: Sequence[MatrixCell], evidence: MatrixEvidence, name: str) -> str:
    """The text of the page of a flat list: every cell, also those that were not run."""
    found = {one.id: one for one in evidence.cells}
    ran = sum(cell.id in found for cell in cells)
    total = f"{ran} of {len(cells)} cells were run{f', on {evidence.device}' if ran else ' so far'}."
    return COSTS.format(name=name, total=total) + "".join(_cost(cell.id, found.get(cell.id)) for cell in cells)


def _cost(name: str, one: CellRecord | None) -> str:
    if one is None:
        return f"| {name} | not run | | | | | | | |\n"
    digest = f"`{one.digest[:16]}`" if one.passed and one.digest else f"FAILED: {'; '.join(one.errors)[:120]}"
    arm = one.native
    native = (f"{arm.mismatches} of {arm.tokens}", _each(arm.step_seconds)) if arm else ("not run", "")
    memory = ", ".join(f"{what} {count / 1e9:.2f} GB" for what, count in one.memory.items())
    ours = (name, one.steps, one.tokens, one.mismatches, digest, _each(one.step_seconds))
    return f"| {' | '.join(map(str, (*ours, *native, memory)))} |\n"


def _each(seconds: Sequence[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds)
