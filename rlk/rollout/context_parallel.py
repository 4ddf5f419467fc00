"""Rollout context parallelism: ranks share out the query rows of prefill steps and the rows of every KV page.

vLLM 0.26.0's first model runner takes `prefill_context_parallel_size`, and then hands every rank all tokens, all slots
and whole pages. So the model takes its own rows (rlk.rollout.partition), a rank keeps its own rows of each page
(rlk.rollout.paging), and what attention needs of the others is gathered as bytes before the one attention core runs.
A step that only decodes is computed whole by every rank, from gathered pages: a gather less a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rlk.evidence.partition import rows_key
from rlk.kernels import attention
from rlk.kernels.collectives.base import Collective
from rlk.rollout.paging import PagedBatch, as_runs, gather_pages, own_slots, used_pages
from rlk.rollout.partition import Cut, own_requests

GATHER_BYTES = 64 << 20
"""Pages of as many layers as fit are gathered at once: a small model moves a whole step in one exchange, and a large
one never holds more than about this much, or one layer, of what is sharded."""


@dataclass(frozen=True)
class Partitioned:
    """Counts of one rank since the start or a reset: steps whose query rows were shared out, the rows of those steps,
    and how many of them this rank computed. `own_key` says which ones, see rlk.evidence.partition."""

    steps: int = 0
    rows: int = 0
    own_rows: int = 0
    own_key: int = 0

    def after(self, rows: int, pieces: tuple[range, ...]) -> Partitioned:
        """With one more step, of which this rank took these rows."""
        own = sum(map(len, pieces))
        key = (self.own_key + rows_key(self.rows, pieces)) % 2**64
        return Partitioned(self.steps + 1, self.rows + rows, self.own_rows + own, key)


@dataclass(frozen=True)
class ShardedBatch(PagedBatch):
    """A step whose pages are spread over a group.

    cut: None where every rank computes every row. own: the rows computed here against the gathered pages; its slots
    are those of all T new rows there. kept int64 [T]: their slots in this rank's own runs.
    """

    cut: Cut | None
    own: PagedBatch
    kept: torch.Tensor
    pages: torch.Tensor
    caches: Mapping[str, torch.Tensor]
    group: Collective
    gathered: dict[str, torch.Tensor] = field(default_factory=dict)

    def update(self, layer: str, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes the step's keys and values of a layer to this rank's runs; returns its whole pages [P, HK, B, 2D].

        k, v [rows computed here, HK, D], with padding where the step is cut.
        """
        pages = self._whole(layer)
        if self.cut is not None:
            k, v = self.cut.whole(torch.cat([k, v], 2), f"{layer} keys and values").chunk(2, 2)
        k, v = k[: self.tokens].contiguous(), v[: self.tokens].contiguous()
        attention.write_pages(k, v, as_runs(self.caches[layer], self.group.size), self.kept)
        attention.write_pages(k, v, pages, self.own.slots)
        return pages

    def _whole(self, layer: str) -> torch.Tensor:
        """A layer's pages as they were before this step: a step writes each layer once, after this."""
        if layer not in self.gathered:
            names = list(self.caches)
            at, runs = names.index(layer), as_runs(self.caches[layer], self.group.size)
            size = self.pages.numel() * runs[0].numel() * runs.element_size() * self.group.size
            coming = names[at : at + max(1, GATHER_BYTES // size)]
            whole = gather_pages([as_runs(self.caches[n], self.group.size) for n in coming], self.pages, self.group)
            self.gathered.update(zip(coming, whole, strict=True))
        return self.gathered.pop(layer)


class ContextParallel:
    """One rank's place in the group, and what it has shared out so far."""

    def __init__(self, group: Collective) -> None:
        self.group = group
        self.counts = Partitioned()

    def share(
        self, batch: PagedBatch, block: int, caches: Mapping[str, torch.Tensor], *, prefill: bool
    ) -> ShardedBatch:
        """A step as this rank sees it. caches: by layer, in order, as vLLM shaped them. prefill: some request has more
        than one row."""
        used = used_pages(batch, block)
        cut = Cut.of(batch.tokens, self.group, batch.slots.device) if prefill else None
        own = own_requests(batch, used, cut.pieces if cut else (range(batch.tokens),))
        kept = own_slots(batch.slots[: batch.tokens], block, self.group.rank, self.group.size)
        return ShardedBatch(
            **vars(batch), cut=cut, own=own, kept=kept, pages=used.pages, caches=caches, group=self.group
        )

    def taken(self, batch: PagedBatch | None) -> Cut | None:
        """Which rows this rank computes now, counted; None where it computes all."""
        cut = batch.cut if isinstance(batch, ShardedBatch) else None
        if batch is not None and cut is not None:
            self.counts = self.counts.after(batch.tokens, cut.pieces)
        return cut
