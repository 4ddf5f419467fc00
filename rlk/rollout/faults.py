"""A fault of an engine's pages: what a request computes again after a preemption is not written to its page. See
rlk.plan.faults."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlk.plan.faults import Moment, moment
from rlk.rollout.context_parallel import ShardedBatch
from rlk.rollout.paging import PagedBatch


def page_fault(inject: str | None) -> PageFault | None:
    """The fault of the pages, or None."""
    when = moment(inject, ("pages",), ("rollout",))
    return None if when is None else PageFault(when)


class PageFault:
    """Turns slots of the first page that a resumed request fills again into padding, so that its reader finds what the
    page's last owner left there."""

    def __init__(self, when: Moment) -> None:
        self.when = when
        self.resumed: Collection[str] = ()
        """Requests of the coming step that were thrown out of the cache and are computed again."""

    def spoil(self, batch: PagedBatch, requests: Sequence[str], page: int) -> None:
        """Changes the slots of a step whose rows belong to these requests; `page` is the page size."""
        if not self.when.on:
            return
        slots = (batch.kept, batch.own.slots) if isinstance(batch, ShardedBatch) else (batch.slots,)
        first = batch.query_first.tolist()
        for number, request in enumerate(requests):
            if request in self.resumed:
                for one in slots:
                    one[first[number] : min(first[number] + page, first[number + 1])] = -1
