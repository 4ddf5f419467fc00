"""Faults between training and the next rollout: what the engines get of an update. See rlk.plan.faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlk.driver.sync import Bits
from rlk.plan.faults import Moment, moment

_LEFT_OUT = {
    "sync-without-head": "head",
    "sync-without-norm": "norm",
    "sync-without-q-norm": "layers.0.q_norm",
    "sync-without-embedding": "embed",
}


def sync_fault(inject: str | None) -> SyncFault | None:
    """The fault of the synchronisation, or None."""
    when = moment(inject, ("sync",), ("rollout",))
    return None if when is None else SyncFault(when)


class SyncFault:
    """Decides what an engine gets; `when.step` is the step whose update travels."""

    def __init__(self, when: Moment) -> None:
        self.when, self.name = when, when.injection.fault.name

    def shards(self, engine: int, shards: Sequence[Mapping[str, Bits]]) -> Sequence[Mapping[str, Bits]]:
        """What this engine gets, by tensor-parallel rank."""
        nothing: list[dict[str, Bits]] = [{} for _ in shards]
        if not self.when.on:
            return shards
        if self.name == "sync-one-engine":
            return shards if engine == 0 else nothing
        if engine > 0:
            return shards
        if self.name == "stale-weights":
            return nothing
        return [{name: part for name, part in one.items() if name != _LEFT_OUT[self.name]} for one in shards]
