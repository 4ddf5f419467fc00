"""With rollout context parallelism: were the query rows really shared out, each to one rank?"""

from __future__ import annotations

from rlk.evidence import layout
from rlk.evidence.checks.tally import Tally
from rlk.evidence.partition import rows_key
from rlk.evidence.record import Record
from rlk.evidence.schemas import Partitioned
from rlk.evidence.verdict import Failure


def query_partition(run: Record, tally: Tally) -> None:
    """At every tensor-parallel place of every engine the context-parallel ranks computed disjoint rows, which are all
    rows of the steps that were shared out; there were such steps; and without context parallelism there were none."""
    tp, said = run.plan.rollout.tp, run.engine_readback()
    for engine in range(run.plan.engines):
        roles = [layout.engine_role(engine, rank) for rank in range(run.plan.engine_ranks)]
        found = {role: said[role].partitioned for role in roles if role in said}
        if run.plan.rollout.cp == 1:
            for role, counts in found.items():
                tally.equal(_where(role), "steps", counts.steps, 0)
            continue
        for first in range(tp):
            # Engine rank = cp_rank * TP + tp_rank; a rank that said nothing is missed in the sums.
            _one_owner_each(tally, {role: found[role] for role in roles[first::tp] if role in found})


def _one_owner_each(tally: Tally, ranks: dict[str, Partitioned]) -> None:
    if not ranks:
        return  # `engine_settings` is red for the missing ranks
    whole = next(iter(ranks.values()))
    for role, counts in ranks.items():
        tally.equal(_where(role), "steps", counts.steps, whole.steps)
        tally.equal(_where(role), "rows", counts.rows, whole.rows)
        tally.add()
        if not (counts.steps and counts.own_rows):
            message = f"{_where(role)}: {counts.own_rows} rows of {counts.steps} shared steps: it took no part"
            tally.fail(message, Failure(where=_where(role)))
    place = _where(" ".join(ranks))
    tally.equal(place, "own_rows", sum(counts.own_rows for counts in ranks.values()), whole.rows)
    keys = sum(counts.own_key for counts in ranks.values()) % 2**64
    tally.equal(place, "own_key", f"{keys:016x}", f"{rows_key(0, [range(whole.rows)]):016x}")


def _where(role: str) -> str:
    return f"{layout.MANIFEST} readback {role} partitioned"
