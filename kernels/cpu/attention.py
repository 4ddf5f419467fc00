"""CPU form of attention: attention.cpp, one core for packed and paged keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rlk.kernels.attention import LOG2_E
from rlk.kernels.cpu.library import load, pointer
from rlk.kernels.tree import tree_sum

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


def describe() -> str:
    """Which implementation runs."""
    return "cpu: fixed loop order in C++"


def softmax_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(head_dim)


def _attend(
    q: torch.Tensor, k: int, v: int, kv_heads: int, head_stride: int, offsets: torch.Tensor, key_first: torch.Tensor,
    first: torch.Tensor, positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    t, h, d = q.shape
    out, lse = torch.empty_like(q), torch.empty(t, h, dtype=F32)
    load().rlk_attention(
        pointer(q, BF16), k, v, pointer(offsets, I64), pointer(key_first, I64), pointer(first, I64),
        pointer(positions, I64), pointer(out, BF16), pointer(lse, F32), softmax_scale(d) * LOG2_E,
        first.numel() - 1, h, kv_heads, d, head_stride,
    )  # fmt: skip
    return out, lse


def segments(positions: torch.Tensor, first: torch.Tensor, key_first: torch.Tensor) -> None:
    """See rlk.kernels.attention: nothing is needed."""


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    first: torch.Tensor,
    key_first: torch.Tensor,
    segments: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See rlk.kernels.attention."""
    rows, heads, d = k.shape
    offsets = torch.arange(rows, dtype=I64) * (heads * d)
    return _attend(q, pointer(k, BF16), pointer(v, BF16), heads, d, offsets, key_first, first, positions)


def packed_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    positions: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
) -> None:  # fmt: skip
    """See rlk.kernels.attention."""
    (t, h, d), (keys, kv_heads, _) = q.shape, k.shape
    offsets = torch.arange(keys, dtype=I64) * (kv_heads * d)
    scale = softmax_scale(d)
    load().rlk_attention_backward(
        pointer(dout, BF16), pointer(q, BF16), pointer(k, BF16), pointer(v, BF16), pointer(out, BF16), pointer(lse,
        F32), pointer(offsets, I64), pointer(positions, I64), pointer(dq, BF16), pointer(dk, F32), pointer(dv, F32),
        scale * LOG2_E, scale, t, keys, h, kv_heads, d, d,
    )  # fmt: skip


def packed_gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    positions: torch.Tensor, first: torch.Tensor, key_first: Sequence[int],
    slices: Sequence[Sequence[tuple[int, int]]],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See rlk.kernels.attention. `first` is not needed: the slices hold all rows."""
    dq, dkv = torch.empty_like(q), torch.empty(k.shape[0], 2, *k.shape[1:], dtype=F32)
    for i, ranges in enumerate(slices):
        keys = slice(key_first[i], key_first[i + 1])
        leaves = torch.zeros(len(ranges), 2, *k[keys].shape)
        for leaf, (a, z) in zip(leaves, ranges, strict=True):
            if a < z:
                rows = (dout[a:z], q[a:z], k[keys], v[keys], out[a:z], lse[a:z], positions[a:z], dq[a:z])
                packed_backward(*rows, leaf[0], leaf[1])
        dkv[keys] = tree_sum(leaves.transpose(1, 2))
    return dq, dkv


def write_pages(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See rlk.kernels.attention."""
    block, d = cache.shape[2], k.shape[2]
    live = slots >= 0
    page, row = slots[live] // block, slots[live] % block
    cache[page, :, row, :d] = k[live]
    cache[page, :, row, d:] = v[live]


def paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_first: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """See rlk.kernels.attention."""
    _, heads, block, d2 = cache.shape
    lengths, first = seq_lens.to(I64), query_first.to(I64)
    counts = first[1:] - first[:-1]
    key_first = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    position = torch.arange(int(key_first[-1])) - key_first[request]
    page = block_table.to(I64)[request, position // block]
    offsets = (page * heads * block + position % block) * d2
    owner = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    query_position = torch.arange(q.shape[0]) - first[owner] + (lengths - counts)[owner]
    base = pointer(cache, BF16)
    value = base + (d2 // 2) * cache.element_size()
    return _attend(q, base, value, heads, block * d2, offsets, key_first, first, query_position)[0]
