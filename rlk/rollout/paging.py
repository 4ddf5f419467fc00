"""KV pages of one step: the requests' tables, and pages whose rows are spread over a context-parallel group.

A page of B rows is cut in `size` runs of B / size rows, in row order; a rank keeps its own run of every page. Reading
gathers the runs of the pages that a step uses and lays them end to end: bytes move, nothing is computed, so attention
sees the page that one rank alone would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk.kernels.collectives.base import Collective


@dataclass(frozen=True)
class PagedBatch:
    """One step's requests. T tokens, R requests, B pages of the longest request.

    query_first int32 [R + 1]; seq_lens int32 [R], with this step's tokens; block_table int32 [R, B]; slots int64 [T].
    """

    tokens: int
    query_first: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class UsedPages:
    """The pages that a step reads or writes, and the step in terms of them: page i of the gathered ones is pages[i].

    pages int64 [P], each once; block_table int32 [R, B]; slots int64 [T], -1 where the step's was.
    """

    pages: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


def used_pages(batch: PagedBatch, block: int) -> UsedPages:
    """A page that several requests share comes once, so that rows written in this step are seen by all of them."""
    table = batch.block_table.to(torch.int64)
    column = torch.arange(table.shape[1], device=table.device)
    live = column[None] * block < batch.seq_lens[:, None]
    pages = torch.unique(table[live])
    # What lies beyond a sequence names any page: nothing reads it.
    local = torch.searchsorted(pages, table).clamp(max=pages.numel() - 1)
    slots = batch.slots[: batch.tokens]
    page = torch.searchsorted(pages, slots.clamp(min=0) // block)
    moved = torch.where(slots >= 0, page * block + slots % block, -1)
    return UsedPages(pages, local.to(torch.int32), moved)


def own_slots(slots: torch.Tensor, block: int, rank: int, size: int) -> torch.Tensor:
    """Slots of whole pages as slots of this rank's runs; -1 for rows that another rank keeps."""
    rows = block // size
    row = slots % block
    return torch.where((slots >= 0) & (row // rows == rank), slots // block * rows + row % rows, -1)


def as_runs(cache: torch.Tensor, size: int) -> torch.Tensor:
    """vLLM's pages [blocks, HK, B, 2D / size] as this rank's runs [blocks, HK, B / size, 2D]: the same memory.

    vLLM 0.26.0 knows no page of fewer rows than the scheduler's, so its spec says heads of D / size.
    """
    blocks, heads, block, width = cache.shape
    return cache.view(blocks, heads, block // size, width * size)


def gather_pages(runs: Sequence[torch.Tensor], pages: torch.Tensor, group: Collective) -> torch.Tensor:
    """Whole pages [layers, P, HK, B, 2D] from the ranks' runs [blocks, HK, B / size, 2D], one tensor a layer."""
    mine = torch.stack([run[pages] for run in runs])
    return group.all_gather(mine, "KV pages").permute(1, 2, 3, 0, 4, 5).flatten(3, 4).contiguous()
