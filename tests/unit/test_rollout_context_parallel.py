"""Sharing out a step's query rows and every page's rows over ranks changes no byte: of the pages, or of attention.

Ranks are threads. Five requests of 1, 7, 8, 9 and 70 tokens: below, at and above the eight virtual slices, a page's
edge, and past one block of 64 keys; pages of 8 and 16 rows in random order, the third and fourth requests sharing their
first page. Four steps: a first prefill, the rest of it beside decoding, three rows alone (most of eight ranks are empty
then), and decoding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from rlk.evidence.partition import rows_key
from rlk.kernels import attention
from rlk.kernels.collectives.base import Alone
from rlk.model.parallel import ParallelContext
from rlk.rollout import context_parallel
from rlk.rollout.context_parallel import ContextParallel, Partitioned
from rlk.rollout.paging import PagedBatch, as_runs, gather_pages, own_slots
from rlk.rollout.partition import Cut, pieces_of
from tests.unit.ranks import ThreadCollective, on_ranks

SIZES = (1, 2, 4, 8)
HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, ("0", "1", "2")
LENGTHS = (1, 7, 8, 9, 70)
SHARED = (2, 3)  # the requests whose first page is one
STEPS = (  # request -> positions computed in the step
    {0: (0, 1), 1: (0, 5), 2: (0, 7), 3: (8, 9), 4: (0, 40)},
    {1: (5, 6), 4: (40, 67)},
    {4: (67, 69), 2: (7, 8)},
    {1: (6, 7), 4: (69, 70)},
)


@dataclass(frozen=True)
class Seen:
    """What one rank has after all steps: whole pages by layer, own bytes, outputs of every step, counts."""

    pages: torch.Tensor
    held: int
    outputs: list[torch.Tensor]
    rows: list[tuple[range, ...]]
    counts: Partitioned


def values(kind: int, request: int, layer: int, first: int, last: int) -> torch.Tensor:
    """q, k or v of positions first..last: a function of request and position, as in a model."""
    heads = KV_HEADS if kind else HEADS
    generator = torch.Generator().manual_seed(100 * request + 10 * layer + kind)
    return torch.randn(max(LENGTHS), heads, DIM, generator=generator)[first:last].to(torch.bfloat16)


def tables(block: int) -> torch.Tensor:
    """Pages of every request, in random order; page 0 is nobody's, as in vLLM."""
    need = [-(-n // block) for n in LENGTHS]
    order = 1 + torch.randperm(sum(need), generator=torch.Generator().manual_seed(1))
    table = torch.zeros(len(need), max(need) + 1, dtype=torch.int32)
    for r, pages in enumerate(order.split(need)):
        table[r, : len(pages)] = pages
    if block == 8:
        table[SHARED[1], 0] = table[SHARED[0], 0]
    return table


def batch_of(step: dict[int, tuple[int, int]], block: int) -> PagedBatch:
    table = tables(block)[list(step)]
    counts = torch.tensor([0] + [last - first for first, last in step.values()])
    slots = []
    for row, (first, last) in zip(table, step.values(), strict=True):
        position = torch.arange(first, last)
        slots.append(row[position // block].long() * block + position % block)
    lengths = torch.tensor([last for _, last in step.values()], dtype=torch.int32)
    return PagedBatch(int(counts.sum()), counts.cumsum(0).to(torch.int32), lengths, table, torch.cat(slots))


def joined(step: dict[int, tuple[int, int]], kind: int, layer: int) -> torch.Tensor:
    return torch.cat([values(kind, r, layer, first, last) for r, (first, last) in step.items()])


def play(context: ParallelContext, block: int) -> Seen:
    """All steps on one rank."""
    cp = context.cp
    owner, pages = ContextParallel(cp), int(tables(block).max()) + 1
    caches = {n: torch.zeros(pages, KV_HEADS, block, 2 * DIM // cp.size, dtype=torch.bfloat16) for n in LAYERS}
    outputs, rows = [], []
    for number, step in enumerate(STEPS):
        batch = owner.share(batch_of(step, block), block, caches, prefill=number < 3)
        cut = owner.taken(batch)
        mine = torch.arange(batch.tokens) if cut is None else cut.rows
        rows.append((range(batch.tokens),) if cut is None else cut.pieces)
        for i, name in enumerate(LAYERS):
            q, k, v = (joined(step, kind, i)[mine] for kind in range(3))
            whole = batch.update(name, k, v)
            out = torch.zeros_like(q)
            own = batch.own
            out[: own.tokens] = attention.paged(q[: own.tokens], whole, own.block_table, own.query_first, own.seq_lens)
            outputs.append(out if cut is None else cut.whole(out, "outputs"))
    every = gather_pages([as_runs(c, cp.size) for c in caches.values()], torch.arange(pages), cp)
    return Seen(every, sum(c.numel() for c in caches.values()), outputs, rows, owner.counts)


def plain(block: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same steps as one rank takes them without any of this."""
    pages = int(tables(block).max()) + 1
    caches = [torch.zeros(pages, KV_HEADS, block, 2 * DIM, dtype=torch.bfloat16) for _ in LAYERS]
    outputs = []
    for step in STEPS:
        batch = batch_of(step, block)
        for i, cache in enumerate(caches):
            q, k, v = (joined(step, kind, i) for kind in range(3))
            attention.write_pages(k, v, cache, batch.slots)
            outputs.append(attention.paged(q, cache, batch.block_table, batch.query_first, batch.seq_lens))
    return torch.stack(caches), outputs


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_pages_and_attention_equal_one_rank(size: int, block: int) -> None:
    pages, outputs = plain(block)
    for seen in on_ranks(1, size, partial(play, block=block)):
        assert same(seen.pages, pages)
        assert seen.held * size == pages.numel()
        assert all(same(a, b) for a, b in zip(seen.outputs, outputs, strict=True))


def test_steps_shared_a_page_and_left_ranks_empty() -> None:
    """The events without which the equalities above would say little."""
    table = tables(8)
    assert table[SHARED[0], 0] == table[SHARED[1], 0]
    ranks = on_ranks(1, 8, partial(play, block=8))
    assert any(sum(map(len, seen.rows[2])) == 0 for seen in ranks)
    assert all(sum(map(len, seen.rows[0])) > 0 for seen in ranks)


def test_rank_that_writes_anothers_rows_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    pages, outputs = plain(16)

    def theirs(slots: torch.Tensor, block: int, rank: int, size: int) -> torch.Tensor:
        return own_slots(slots, block, 2 if rank == 1 else rank, size)

    monkeypatch.setattr(context_parallel, "own_slots", theirs)
    seen = on_ranks(1, 4, partial(play, block=16))[0]
    assert not same(seen.pages, pages)
    assert not all(same(a, b) for a, b in zip(seen.outputs, outputs, strict=True))


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_few_or_many_layers_at_once_are_equal(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "GATHER_BYTES", limit)
    stages: list[str] = []
    gather = ThreadCollective.all_gather

    def counted(self: ThreadCollective, t: torch.Tensor, stage: str) -> torch.Tensor:
        if self.rank == 0:
            stages.append(stage)
        return gather(self, t, stage)

    monkeypatch.setattr(ThreadCollective, "all_gather", counted)
    seen = on_ranks(1, 2, partial(play, block=8))[1]
    pages, outputs = plain(8)
    assert same(seen.pages, pages)
    assert all(same(a, b) for a, b in zip(seen.outputs, outputs, strict=True))
    layers, steps = len(LAYERS), len(STEPS)
    # One more at the end, when the test reads all pages.
    assert stages.count("KV pages") == 1 + steps * (layers if limit == 1 else 1)
    assert sum("keys and values" in stage for stage in stages) == layers * (steps - 1)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 15, 16, 17, 32, 117])
@pytest.mark.parametrize("size", SIZES)
def test_every_row_has_exactly_one_owner(size: int, rows: int) -> None:
    pieces = [pieces_of(rank, size, rows) for rank in range(size)]
    assert sorted(row for two in pieces for piece in two for row in piece) == list(range(rows))
    counts = [sum(map(len, two)) for two in pieces]
    assert max(counts) - min(counts) <= 2
    assert sum(rows_key(5, two) for two in pieces) % 2**64 == rows_key(0, [range(5, 5 + rows)])


def test_rows_taken_twice_or_left_out_have_another_key() -> None:
    whole = rows_key(0, [range(20)])
    assert rows_key(0, [range(19)]) + rows_key(0, [range(18, 19)]) != whole
    assert rows_key(0, [range(10), range(9, 19)]) != whole
    assert rows_key(0, [range(0), range(3, 3)]) == 0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_counts_of_the_ranks_add_up(size: int) -> None:
    counts = [seen.counts for seen in on_ranks(1, size, partial(play, block=16))]
    rows = sum(last - first for step in STEPS[:3] for first, last in step.values())
    assert {(c.steps, c.rows) for c in counts} == {(3, rows)}
    assert sum(c.own_rows for c in counts) == rows
    assert sum(c.own_key for c in counts) % 2**64 == rows_key(0, [range(rows)])


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_every_slot_has_exactly_one_owner(size: int, block: int) -> None:
    slots = torch.tensor([-1, *range(3 * block)])
    kept = torch.stack([own_slots(slots, block, rank, size) for rank in range(size)])
    assert (kept[:, 0] == -1).all()
    assert ((kept[:, 1:] >= 0).sum(0) == 1).all()
    assert all(sorted(mine[mine >= 0].tolist()) == list(range(3 * block // size)) for mine in kept)


def test_lone_rank_takes_everything() -> None:
    cut = Cut.of(9, Alone(), torch.device("cpu"))
    assert cut.rows.tolist() == list(range(9))
    assert cut.whole(torch.arange(9), "test").tolist() == list(range(9))
