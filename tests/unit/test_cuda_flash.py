"""FlashAttention-3 as the forward pass: what the library is asked, without the library.

A stand-in does what its documentation says (bottom-right causal rows of each run, against the first keys of its
sequence or of its pages) in torch. That the library itself agrees with itself is the start-up proof's to say, on a GPU.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from rlk.model.slices import slice_positions
from tests.unit.interpreted import interpreted
from tests.unit.test_cuda_attention import FIRST, LENGTHS, POSITIONS, TOTAL, D, H, K, Q, V, near


def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """The operator's arguments by its own order; those that are not used here must be what switches them off."""
    k_new, v_new, q_v, out, first, keys, keys_new, used_q, lengths, most_q, most_k, table, *more = rest
    batch_idx, left, cos, sin, seqlens, scale_q, scale_k, scale_v, scale, causal, low, high, cap, interleaved = more[
        :14
    ]
    metadata, splits, pack, margin, sinks, ranks, rank, total = more[14:]
    nothing = (k_new, v_new, q_v, keys_new, used_q, batch_idx, left, cos, sin, seqlens, scale_q, scale_k, scale_v)
    assert all(x is None for x in (*nothing, metadata, pack, sinks, total))
    assert (causal, low, high, cap, interleaved, splits, margin, ranks, rank) == (True, -1, -1, 0.0, True, 1, 0, 1, 0)
    assert most_q > 1, "one row: another block size"
    lse = torch.zeros(q.shape[1], q.shape[0])
    for i, n in enumerate(lengths.tolist()):
        a, z = first[i], first[i + 1]
        assert n <= most_k
        if table is None:
            own = [t[keys[i] : keys[i] + n] for t in (k, v)]
        else:
            own = [t[table[i].long()].flatten(0, 1)[:n] for t in (k, v)]
        wide = [t.repeat_interleave(q.shape[1] // t.shape[1], 1).double() for t in own]
        scores = torch.einsum("thd,nhd->htn", q[a:z].double(), wide[0]) * scale
        hidden = torch.arange(n) > torch.arange(n - int(z - a), n)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        out[a:z] = torch.einsum("htn,nhd->thd", scores.softmax(2), wide[1]).to(out.dtype)
        lse[:, a:z] = scores.logsumexp(2).float()
    return out, lse, None, None


def stand_in() -> AbstractContextManager[Any]:
    """The library replaced, in the process in which a test's body runs."""
    from rlk.kernels.cuda import flash

    return mock.patch.object(flash, "_library", return_value=SimpleNamespace(fwd=fwd))


def packed(q: torch.Tensor, positions: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """These rows against all keys."""
    from rlk.kernels.cuda import flash

    with stand_in():
        return flash.packed(q, K, V, flash.Segments.of(positions, first, FIRST), D**-0.5)


@interpreted
def test_packed_rows_are_those_of_the_cpu_form() -> None:
    from rlk.kernels.cpu import attention as cpu

    found, lse = packed(Q, POSITIONS, FIRST)
    expected, expected_lse = cpu.packed(Q, K, V, POSITIONS, FIRST, FIRST)
    near(found, expected, 2**-8)
    near(lse, expected_lse, 1e-5)


@interpreted
def test_rows_of_two_virtual_slices_are_those_of_the_whole() -> None:
    whole, _ = packed(Q, POSITIONS, FIRST)
    kept = [[p for j in (0, 5) for p in slice_positions(j, n)] for n in LENGTHS]
    rows = torch.tensor([int(FIRST[i]) + p for i, own in enumerate(kept) for p in own])
    first = torch.tensor([0, *torch.tensor([len(own) for own in kept]).cumsum(0).tolist()])
    found, _ = packed(Q[rows], POSITIONS[rows], first)
    near(found, whole[rows], 2**-8)


@interpreted
def test_no_rows_ask_nothing_of_the_library() -> None:
    none = torch.zeros(len(LENGTHS) + 1, dtype=torch.int64)
    out, lse = packed(Q[:0], POSITIONS[:0], none)
    assert (out.shape, lse.shape) == ((0, H, D), (0, H))


@interpreted
@pytest.mark.parametrize("page", [16, 64])
def test_pages_hold_the_keys_of_packed_rows(page: int) -> None:
    from rlk.kernels.cuda import attention, flash

    pages = [-(-n // page) for n in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    names = iter(reversed(range(sum(pages))))
    for i, n in enumerate(pages):
        table[i, :n] = torch.tensor([next(names) for _ in range(n)])
    cache = torch.zeros(sum(pages), K.shape[1], page, 2 * D, dtype=torch.bfloat16)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    attention.write_pages(K, V, cache, table[owner, POSITIONS // page].long() * page + POSITIONS % page)
    whole, _ = packed(Q, POSITIONS, FIRST)
    lengths, last = torch.tensor(LENGTHS, dtype=torch.int32), FIRST[1:] - 1
    each = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    with stand_in():
        near(flash.paged(Q, cache, table, FIRST.int(), lengths, D**-0.5), whole, 2**-8)
        near(flash.paged(Q[last], cache, table, each, lengths, D**-0.5), whole[last], 2**-8)


@interpreted
def test_pages_that_are_read_whole_are_refused() -> None:
    from rlk.kernels.cuda import flash
    from rlk.kernels.cuda.choice import KernelChoiceError

    cache = torch.zeros(2, K.shape[1], 128, 2 * D, dtype=torch.bfloat16)
    ends = torch.tensor([0, TOTAL], dtype=torch.int32)
    with pytest.raises(KernelChoiceError, match=r"^RLK_ATTENTION=fa3: pages of 128 tokens: allowed are .* block_size"):
        flash.paged(Q, cache, torch.zeros(1, 2, dtype=torch.int32), ends, ends[1:], D**-0.5)


@interpreted
def test_an_installation_without_the_library_is_refused() -> None:
    from rlk.kernels.cuda import flash
    from rlk.kernels.cuda.choice import KernelChoiceError

    with mock.patch.object(flash, "find_spec", return_value=None):
        flash._library.cache_clear()
        with pytest.raises(KernelChoiceError, match=r"_vllm_fa3_C is not installed: install vLLM for CUDA, or RLK"):
            flash._library()


@interpreted
def test_the_interpreter_refuses_the_library() -> None:
    from rlk.kernels.cuda import choice

    with mock.patch.dict(os.environ, RLK_ATTENTION="fa3"):
        choice.chosen.cache_clear()
        with pytest.raises(choice.KernelChoiceError, match=r"^RLK_ATTENTION=fa3: allowed is triton$"):
            choice.chosen("RLK_ATTENTION")
    choice.chosen.cache_clear()
