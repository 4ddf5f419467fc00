"""A fault of an engine's pages: what a request computes again after a preemption is not written to its page. See
rlk.plan.faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rlk.plan.faults import Moment, moment
from rlk.rollout.vllm_attention import PagedBatch


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

    def spoil(self, metadata: Mapping[str, PagedBatch], requests: Sequence[str], page: int) -> None:
        """Changes the slots of a step whose rows belong to these requests; `page` is the page size."""
        if not self.when.on:
            return
        batch = next(iter(metadata.values()))
        first = batch.query_first.tolist()
        for number, request in enumerate(requests):
            if request in self.resumed:
                batch.slots[first[number] : min(first[number] + page, first[number + 1])] = -1
