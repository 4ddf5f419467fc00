"""A query row depends on itself and on its own keys alone: not on packing, chunks, pages or the rows beside it.

Lengths 1, 63, 64, 65 and 130 lie on both sides of the kernel's block of 64 keys and reach a third block; 4 query heads
over 2 key heads are two groups. Key and value rows span powers of two, so that block size and order of the keys show.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional

from rlk.kernels import attention
from rlk.kernels.tree import tree_sum
from tests.unit.probes import Record, assert_as_accurate, assert_moved, assert_same, left_to_right, normal, spread

LENGTHS = (1, 63, 64, 65, 130)
H, HK, D = 4, 2, 16
TOTAL = sum(LENGTHS)
FIRST = torch.tensor([0, *np.cumsum(LENGTHS).tolist()])
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
Q = spread(TOTAL, H, D, seed=1, factor=1.0) * 0.5
K, V = spread(2, TOTAL, HK, D, seed=2, factor=1.0) * 0.5
Row = npt.NDArray[np.float32]


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    return attention.packed(Q, K, V, POSITIONS, FIRST, FIRST)


def sequence(i: int) -> slice:
    return slice(int(FIRST[i]), int(FIRST[i + 1]))


def alone(i: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The given rows (positions) of sequence i against its keys, nothing else in the batch."""
    keys, n = sequence(i), LENGTHS[i]
    return attention.packed(
        Q[keys][rows], K[keys], V[keys], rows, torch.tensor([0, rows.numel()]), torch.tensor([0, n])
    )


def exp2(x: Row) -> Row:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def declared_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numeric program of one row, q [D], k and v [keys, D]: online softmax over blocks counted from position 0.

    Returns the output bf16 [D] and the log-sum-exp fp32.
    """
    qs, ks, vs = (t.float().numpy() for t in (q, k, v))
    scale = np.float32(1.0 / math.sqrt(len(qs)) * math.log2(math.e))
    top, total, acc = np.float32(-np.inf), np.zeros((), np.float32), np.zeros(len(qs), np.float32)
    for start in range(0, len(ks), block):
        kb, vb = ks[start : start + block], vs[start : start + block]
        s = np.zeros(len(kb), np.float32)
        for d in range(len(qs)):
            s = s + qs[d] * kb[:, d]
        s = s * scale
        new = max(top, np.float32(s.max()))
        p, fade, row_sum = exp2(s - new), exp2(np.asarray(top - new)), np.float32(0)
        for x in p:
            row_sum = np.float32(row_sum + x)
        total, acc, top = total * fade + row_sum, acc * fade, new
        rounded = torch.from_numpy(p).to(torch.bfloat16).float().numpy()
        for x, row in zip(rounded, vb, strict=True):
            acc = acc + x * row
    out = torch.from_numpy(np.asarray(acc / total, np.float32)).to(torch.bfloat16) + 0.0
    return out, torch.tensor(top + np.float32(np.log2(np.float64(total))))


@pytest.mark.parametrize("i", range(len(LENGTHS)), ids=lambda i: f"length{LENGTHS[i]}")
def test_a_row_follows_the_declared_program(i: int) -> None:
    keys, last = sequence(i), LENGTHS[i] - 1
    for h in range(H):
        expected = declared_row(Q[keys][last, h], K[keys, h // (H // HK)], V[keys, h // (H // HK)])
        for found, value in zip(whole(), expected, strict=True):
            assert_same(found[keys][last, h], value, f"head {h}")


def test_another_block_size_would_show() -> None:
    keys, out = sequence(4), whole()[0]
    rows = [(Q[keys][-1, h], K[keys, h // 2], V[keys, h // 2]) for h in range(H)]
    assert_moved(torch.stack([declared_row(*row, block=32)[0] for row in rows]), out[-1], "blocks of 32 keys")
    backwards = torch.stack([declared_row(q, k.flip(0), v.flip(0))[0] for q, k, v in rows])
    assert_moved(backwards, out[-1], "keys in reverse")


@pytest.mark.parametrize("i", range(len(LENGTHS)), ids=lambda i: f"length{LENGTHS[i]}")
def test_a_packed_sequence_equals_itself_alone(i: int) -> None:
    for found, expected in zip(alone(i, torch.arange(LENGTHS[i])), whole(), strict=True):
        assert_same(found, expected[sequence(i)])


def test_a_row_is_the_same_in_every_subset() -> None:
    out, lse = (t[sequence(4)] for t in whole())
    for rows in ([129], [0, 64, 129], [129, 5, 63, 64], list(range(17, 90))):
        index = torch.tensor(rows)
        found, found_lse = alone(4, index)
        assert_same(found, out[index], f"rows {rows}")
        assert_same(found_lse, lse[index], f"log-sum-exp of rows {rows}")


def test_an_empty_sequence_is_legal() -> None:
    first = torch.tensor([0, 0, 1, 1, TOTAL, TOTAL])
    keys = torch.tensor([0, 0, 1, 1, TOTAL, TOTAL])
    positions = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(TOTAL - 1)])
    found, _ = attention.packed(Q, K, V, positions, first, keys)
    assert_same(found[:1], whole()[0][:1])


def test_keys_after_a_row_are_never_read() -> None:
    keys = sequence(4)
    k, v = (t[keys].clone() for t in (K, V))
    k[80:], v[80:] = float("nan"), float("nan")
    rows, ends = torch.arange(80), torch.tensor([0, 80])
    found, _ = attention.packed(Q[keys][:80], k, v, rows, ends, torch.tensor([0, 130]))
    assert_same(found, whole()[0][keys][:80])


def paged_cache(block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all sequences in pages that lie in descending order in memory, NaN where nothing was written."""
    pages = [-(-n // block) for n in LENGTHS]
    cache = torch.full((sum(pages) + 1, HK, block, 2 * D), float("nan"), dtype=torch.bfloat16)
    table, free = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32), sum(pages)
    for i, n in enumerate(pages):
        table[i, :n] = torch.arange(free, free - n, -1)
        free -= n
        p = torch.arange(LENGTHS[i])
        attention.write_pages(K[sequence(i)], V[sequence(i)], cache, table[i, p // block].long() * block + p % block)
    return cache, table


@pytest.mark.parametrize("block", [16, 64, 128])
def test_pages_of_any_size_equal_packed_keys(block: int) -> None:
    cache, table = paged_cache(block)
    found = attention.paged(Q, cache, table, FIRST.int(), torch.tensor(LENGTHS, dtype=torch.int32))
    assert_same(found, whole()[0])


@pytest.mark.parametrize("chunk", [1, 17, 64])
def test_a_chunked_prompt_equals_a_whole_one(chunk: int) -> None:
    cache, table = paged_cache(16)
    q, out = Q[sequence(4)], whole()[0][sequence(4)]
    for start in range(0, 130, chunk):
        rows, end = q[start : start + chunk].contiguous(), min(start + chunk, 130)
        ends, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, end - start], [end]))
        assert_same(attention.paged(rows, cache, table[4:], ends, lengths), out[start:end], f"rows from {start}")


def test_decoding_in_any_company_equals_prefill() -> None:
    cache, table = paged_cache(16)
    expected, last = whole()[0], FIRST[1:] - 1
    for group in ([4], [0, 4], [4, 2, 1], [3, 2, 1, 0, 4]):
        index, ends = torch.tensor(group), torch.arange(len(group) + 1, dtype=torch.int32)
        lengths = torch.tensor([LENGTHS[i] for i in group], dtype=torch.int32)
        found = attention.paged(Q[last[index]].contiguous(), cache, table[index], ends, lengths)
        assert_same(found, expected[last[index]], f"requests {group}")


def test_padding_slots_are_not_written() -> None:
    cache = torch.zeros(2, HK, 16, 2 * D, dtype=torch.bfloat16)
    attention.write_pages(K[:3], V[:3], cache, torch.tensor([-1, 17, -1]))
    assert_same(cache[1, :, 1], torch.cat([K[1], V[1]], -1))
    cache[1, :, 1] = 0
    assert not cache.any()


def backward(ranges: list[list[int]], heads: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[torch.Tensor, torch.Tensor]:
    """dq of sequence 4 and its leaves of dk and dv, [slices, 2, keys, HK, D], for the given slices of its rows.

    Heads not named have no incoming gradient, so they add exact zeros.
    """
    keys = sequence(4)
    q, k, v, dout = Q[keys], K[keys], V[keys], torch.zeros(130, H, D, dtype=torch.bfloat16)
    dout[:, heads] = spread(130, H, D, seed=3)[:, heads]
    out, lse = (t[keys] for t in whole())
    dq, leaves = torch.zeros_like(q), torch.zeros(len(ranges), 2, 130, HK, D)
    for leaf, positions in zip(leaves, ranges, strict=True):
        rows = torch.tensor(positions)
        part = torch.empty_like(q[rows])
        slices = (dout[rows], q[rows], k, v, out[rows], lse[rows], rows)
        attention.packed_backward(*slices, part, leaf[0], leaf[1])
        dq[rows] = part
    return dq, leaves


def test_a_query_gradient_is_the_same_in_every_slice() -> None:
    expected, _ = backward([list(range(130))])
    for ranges in ([list(range(65)), list(range(65, 130))], [[i] for i in range(130)]):
        assert_same(backward(ranges)[0], expected, f"{len(ranges)} slices")


def test_key_gradients_are_leaves_not_one_chain() -> None:
    _, whole_chain = backward([list(range(130))])
    slices = [[*range(h * 8, h * 8 + 8), *range(130 - 8 * h - 8, 130 - 8 * h)] for h in range(8)]
    leaves = backward(slices)[1]
    assert_moved(tree_sum(leaves), whole_chain[0], "one chain over all rows")
    for size in (2, 4, 8):
        ranks = torch.stack([tree_sum(part) for part in leaves.chunk(size)])
        assert_same(tree_sum(ranks), tree_sum(leaves), f"{size} holders")


def test_a_key_gradient_chains_heads_then_rows() -> None:
    rows = list(range(124, 130))
    leaf = backward([rows])[1][0]
    terms = {(g, r): backward([[r]], heads=(g, 2 + g))[1][0] for g in (0, 1) for r in rows}  # heads g of both groups
    assert_same(left_to_right(torch.stack([terms[g, r] for g in (0, 1) for r in rows])) + 0.0, leaf + 0.0)
    assert_moved(left_to_right(torch.stack([terms[g, r] for r in rows for g in (0, 1)])), leaf, "rows, then heads")


def accuracy_case() -> tuple[torch.Tensor, ...]:
    q, k, v = (normal(130, h, D, seed=s) for h, s in ((H, 4), (HK, 5), (HK, 6)))
    return q, k, v, normal(130, H, D, seed=7)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    qh, kh, vh = (t.transpose(0, 1)[None] for t in (q, k, v))
    return functional.scaled_dot_product_attention(qh, kh, vh, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def test_attention_is_as_accurate_as_torch(record_property: Record) -> None:
    q, k, v, _ = accuracy_case()
    ends = torch.tensor([0, 130])
    found, _ = attention.packed(q, k, v, torch.arange(130), ends, ends)
    assert_as_accurate(found, sdpa(q, k, v), sdpa(q.double(), k.double(), v.double()), record_property)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["dq", "dk", "dv"])
def test_attention_gradients_are_as_accurate_as_torch(which: int, record_property: Record) -> None:
    q, k, v, dout = accuracy_case()
    ends, rows = torch.tensor([0, 130]), torch.arange(130)
    out, lse = attention.packed(q, k, v, rows, ends, ends)
    dq, dk, dv = torch.empty_like(q), torch.zeros(130, HK, D), torch.zeros(130, HK, D)
    attention.packed_backward(dout, q, k, v, out, lse, rows, dq, dk, dv)
    found = (dq, (dk * attention.softmax_scale(q)).to(torch.bfloat16), dv.to(torch.bfloat16))[which]

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(sdpa(*inputs), inputs, dout.to(dtype))[which]

    assert_as_accurate(found, gradient(torch.bfloat16), gradient(torch.float64), record_property)
