"""The support by sorting, with the masses of the kernels themselves: the search without a sort must find it."""
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels.cuda import launch
from rlk.kernels.cuda.programs.masses import mass, row_of
from rlk.kernels.cuda.programs.support import order_of as kernel_order_of
from rlk.kernels.policy import RowParams

Setting = tuple[float, float, int]


@triton.jit
def dump(logits, tops, temperatures, orders, masses, size, stride, BLOCK: tl.constexpr):
    """Order and mass of every logit."""
    row = tl.program_id(0)
    ids, inside, x = row_of(logits, row, tl.program_id(1), size, stride, BLOCK)
    w = mass(x, tl.load(tops + row), tl.load(temperatures + row))
    at = row.to(tl.int64) * size + ids
    tl.store(orders + at, kernel_order_of(x), mask=inside)
    tl.store(masses + at, w, mask=inside)


def order_of(logits: torch.Tensor) -> torch.Tensor:
    """Place in rank order, int32: the larger the logit, the smaller."""
    b = (logits + 0.0).view(torch.int16).to(torch.int32) & 0xFFFF
    b = torch.where(b == 0x8000, 0, b)
    return torch.where(b >= 0x8000, b, 0x7FFF - b)


def supports(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Masses int64 [R, V], and which tokens stay, bool [R, V]: stable sort, exact cumulative sums."""
    r, v = logits.shape
    order, masses = (torch.empty(r, v, dtype=t, device=logits.device) for t in (torch.int32, torch.int64))
    tops = logits.float().amax(1) + 0.0
    grid = (r, launch.tiles(v, 4096))
    launch.run(dump, grid, logits, tops, params.temperature, order, masses, v, logits.stride(0), BLOCK=4096)
    if not torch.equal(order, order_of(logits)):
        raise AssertionError("the kernel's rank order is not that of the bits")
    rank = order.sort(dim=1, stable=True).indices
    place = torch.arange(v, device=logits.device)[None]
    ranked = masses.gather(1, rank).masked_fill(place >= params.top_k[:, None], 0)
    total = ranked.sum(1)
    limit = (params.top_p * total.double()).to(torch.int64)
    before = ranked.cumsum(1) - ranked
    stays = (place < params.top_k[:, None]) & ((before < limit[:, None]) | (place == 0) | (params.top_p >= 1)[:, None])
    return masses, torch.zeros_like(stays).scatter_(1, rank, stays)
