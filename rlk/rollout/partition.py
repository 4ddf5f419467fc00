"""Which query rows of a step each context-parallel rank computes.

The rows of a step are cut as the trainer cuts a sequence: in 16 half-slices, of which a rank owns two runs that lie
opposite each other, so that early and late rows of a long prompt are spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk.kernels.collectives.base import Collective
from rlk.model.slices import half_slice
from rlk.plan.topology import VIRTUAL
from rlk.rollout.paging import PagedBatch, UsedPages


def pieces_of(rank: int, size: int, rows: int) -> tuple[range, range]:
    """The two runs of rows that a rank owns of `rows`, ascending; either may be empty."""
    n, last = VIRTUAL // size, 2 * VIRTUAL - 1
    first = rank * n
    low = range(half_slice(first, rows).start, half_slice(first + n - 1, rows).stop)
    high = range(half_slice(last - first - n + 1, rows).start, half_slice(last - first, rows).stop)
    return low, high


@dataclass(frozen=True)
class Cut:
    """The rows of one step over the ranks of a group. T rows, at most M on one rank.

    pieces: this rank's runs. rows int64 [M]: this rank's rows, then row 0 as padding, so that all ranks move equal
    shapes and no kernel meets an empty matrix. order int64 [T]: where each row lies among the M of every rank.
    """

    pieces: tuple[range, range]
    rows: torch.Tensor
    order: torch.Tensor
    group: Collective

    @classmethod
    def of(cls, tokens: int, group: Collective, device: torch.device) -> Cut:
        """The cut of a step of `tokens` >= 1 rows."""
        ranks = [pieces_of(rank, group.size, tokens) for rank in range(group.size)]
        most = max(len(low) + len(high) for low, high in ranks)
        rows, order = torch.zeros(group.size, most, dtype=torch.int64), torch.empty(tokens, dtype=torch.int64)
        for rank, pieces in enumerate(ranks):
            own = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
            rows[rank, : own.numel()] = own
            order[own] = torch.arange(rank * most, rank * most + own.numel())
        return cls(ranks[group.rank], rows[group.rank].to(device), order.to(device), group)

    @property
    def own(self) -> int:
        """This rank's rows, without the padding."""
        return sum(map(len, self.pieces))

    def whole(self, x: torch.Tensor, stage: str) -> torch.Tensor:
        """All rows [T, ...] of what each rank computed for its own [M, ...]."""
        return self.group.all_gather(x, stage).flatten(0, 1)[self.order]


def own_requests(batch: PagedBatch, used: UsedPages, pieces: Sequence[range]) -> PagedBatch:
    """The rows of these pieces as a batch of their own against gathered pages, every request once a piece.

    A run of a request's rows attends as a shorter request whose last row it ends with: the same keys 0..position. A
    request without rows in a piece has length 0 there.
    """
    first = batch.query_first.to(torch.int64)
    begin, end = first[:-1], first[1:]
    counts, lengths = [], []
    for piece in pieces:
        low, high = (edge.clamp(piece.start, piece.stop) for edge in (begin, end))
        counts.append(high - low)
        lengths.append(torch.where(high > low, batch.seq_lens - (end - high), 0))
    query_first = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0)).to(torch.int32)
    return PagedBatch(
        tokens=sum(map(len, pieces)),
        query_first=query_first,
        seq_lens=torch.cat(lengths).to(torch.int32),
        block_table=used.block_table.repeat(len(pieces), 1),
        slots=used.slots,
    )
