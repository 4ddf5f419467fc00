"""Causal grouped-query attention: one function for training rows, prefill, chunk and decode.

Scores are (q . k) * fp32(log2(e) / sqrt(D)); the softmax is online over blocks of 64 keys counted from position 0,
never split and merged; P is rounded to bf16 before PV (Milakov and Gimelshein, 2018; Dao et al., 2022). A query row
depends on itself and on its own keys alone. Shapes: T query rows, H query heads, HK key heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from rlk.kernels.forms import form

LOG2_E = 1.4426950408889634
"""Exponentials are powers of two: scores are multiplied by this first."""


def segments(positions: torch.Tensor, first: torch.Tensor, key_first: torch.Tensor) -> Any:
    """What `packed` would find out of its last arguments at every call, for those who call it for many layers; None
    where the form needs nothing. A device is waited for."""
    return form("attention", positions).segments(positions, first, key_first)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    first: torch.Tensor,
    key_first: torch.Tensor,
    segments: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of several packed sequences against all keys of each.

    Args:
        q: [T, H, D] bf16; rows first[s]..first[s+1] belong to sequence s, in any subset of its positions.
        k, v: [sum of lengths, HK, D] bf16 in position order; sequence s starts at row key_first[s].
        positions: int64 [T], absolute: a row sees keys 0..position of its own sequence.
        first, key_first: int64 [sequences + 1].
        segments: what `segments` said of positions, first and key_first; found anew where it is None.

    Returns:
        Output [T, H, D] bf16 and the base-2 log-sum-exp of the scaled scores [T, H] fp32, for the backward pass.
    """
    return cast(
        tuple[torch.Tensor, torch.Tensor], form("attention", q).packed(q, k, v, positions, first, key_first, segments)
    )


def packed_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    positions: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
) -> None:  # fmt: skip
    """Gradients of one virtual slice of one sequence.

    q, out, dout, dq: the slice's rows [t, H, D] bf16, positions ascending; k, v: the keys 0..n-1 of the sequence
    [n, HK, D] bf16. Writes dq (a chain over keys, ascending) and adds to dk and dv, the slice's leaves [n, HK, D] fp32
    (a chain over query head within the group, then query row). dk must still be multiplied by 1 / sqrt(D) after the
    leaves are summed.
    """
    form("attention", q).packed_backward(dout, q, k, v, out, lse, positions, dq, dk, dv)


def packed_gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    positions: torch.Tensor, first: torch.Tensor, key_first: Sequence[int],
    slices: Sequence[Sequence[tuple[int, int]]],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of all samples of a micro-batch; arguments as `packed` took and returned them, but for key_first, whose
    numbers are on the host here.

    slices[i]: row ranges of sample i, one a virtual slice held here (1, 2, 4 or 8, the same number for every sample),
    positions ascending within each.

    Returns:
        dq [T, H, D] bf16, and fp32 [keys, 2, HK, D]: dk and dv, for each sample the subtree over its slices. dk must
        still be multiplied by 1 / sqrt(D) after the tree is complete.
    """
    rows = (dout, q, k, v, out, lse, positions, first, key_first, slices)
    return cast(tuple[torch.Tensor, torch.Tensor], form("attention", q).packed_gradients(*rows))


def write_pages(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes rows k, v [T, HK, D] to cache [blocks, HK, block, 2D] (keys, then values); a slot below 0 is padding."""
    form("attention", cache).write_pages(k, v, cache, slots)


def paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_first: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """The last rows of each request against its pages.

    q [T, H, D] bf16; block_table int32 [requests, blocks]; query_first int32 [requests + 1]; seq_lens int32
    [requests], the length including these rows. Returns [T, H, D] bf16.
    """
    return cast(torch.Tensor, form("attention", q).paged(q, cache, block_table, query_first, seq_lens))


def softmax_scale(q: torch.Tensor) -> float:
    """1 / sqrt(D) as the device's form uses it."""
    return cast(float, form("attention", q).softmax_scale(q.shape[-1]))
