"""The part of the start-up proof that is about attention: rows do not depend on how they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from rlk.kernels import attention
from rlk.kernels.requirement import require
from rlk.kernels.tree import VIRTUAL, tree_sum

LENGTHS = {"cpu": (1, 63, 130), "cuda": (1, 63, 300)}
"""Sequences on both sides of a block's edge; the blocks of a GPU's library hold up to 128 keys, ours 64."""
Probe = Callable[[int, int, torch.device], torch.Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """Heads, key heads and head dimension held here, and rows of a cache page."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page: int = 16


@dataclass(frozen=True)
class _Case:
    lengths: tuple[int, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor


def check(shape: AttentionShape, device: torch.device, probe: Probe) -> str:
    """Forward: packed, paged and single rows agree. Backward: slices held together or apart agree.

    Raises:
        ProofError: they do not.
    """
    lengths = LENGTHS[device.type]
    total, d = sum(lengths), shape.head_dim
    q = probe(total, shape.heads * d, device).mul(0.25).view(total, shape.heads, d)
    k, v = probe(2 * total, shape.kv_heads * d, device).mul(0.25).view(2, total, shape.kv_heads, d)
    first = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    case = _Case(lengths, q, k, v, torch.cat([torch.arange(n, device=device) for n in lengths]), first)
    out, lse = attention.packed(q, k, v, case.positions, first, first)
    back = torch.flip(k, (0,))
    moved = attention.packed(q, back, torch.flip(v, (0,)), case.positions, first, first)[0]
    require(not torch.equal(moved, out), "attention", "the probe is not sensitive to order")
    _cut(case, out, lse)
    _forward(case, out, shape)
    _backward(case, out, lse)
    return (
        f"packed, cut, paged and single-row decode agree on sequences of {', '.join(map(str, lengths))} tokens; "
        "gradients agree for slices held together and apart"
    )


def _cut(case: _Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Rows that a context-parallel rank would hold: of each sequence two runs of positions and a single one."""
    device = case.q.device
    kept = [[p for p in (*range(n // 8), n // 2, *range(n - n // 8, n)) if p < n] for n in case.lengths]
    starts = case.first[:-1].tolist()
    rows = torch.tensor([start + p for start, own in zip(starts, kept, strict=True) for p in own], device=device)
    first = torch.tensor([0, *torch.tensor([len(own) for own in kept]).cumsum(0).tolist()], device=device)
    found, mass = attention.packed(
        case.q[rows].contiguous(), case.k, case.v, case.positions[rows].contiguous(), first, case.first
    )
    require(torch.equal(found, out[rows]), "attention", "a row differs in other company")
    require(torch.equal(mass, lse[rows]), "attention", "a row's log-sum-exp differs in other company")


def _forward(case: _Case, expected: torch.Tensor, shape: AttentionShape) -> None:
    device, block, lengths = case.q.device, shape.page, case.lengths
    pages = [-(-n // block) for n in lengths]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=device)
    order = list(range(1, sum(pages) + 1))[::-1]  # pages in descending memory order
    for i, n in enumerate(pages):
        table[i, :n] = torch.tensor([order.pop(0) for _ in range(n)])
    hole = float("nan")
    cache = torch.full((sum(pages) + 1, shape.kv_heads, block, 2 * shape.head_dim), hole, device=device)
    cache = cache.to(torch.bfloat16)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    slots = table[owner, case.positions // block].long() * block + case.positions % block
    attention.write_pages(case.k, case.v, cache, slots)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    found = attention.paged(case.q, cache, table, case.first.int(), seq_lens)
    require(torch.equal(found, expected), "attention", "paged differs from packed")
    last = case.first[1:] - 1
    one_each = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    decoded = attention.paged(case.q[last].contiguous(), cache, table, one_each, seq_lens)
    require(torch.equal(decoded, expected[last]), "attention", "decoding a row differs from prefilling it")


def _backward(case: _Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The longest sequence, cut in slices of one row, of a few and of many, against the same slices one at a time."""
    a, z = int(case.first[-2]), int(case.first[-1])
    n = z - a
    edges = [0, 1, 2, 7, 23, 55, 55, 100, n]
    slices = list(pairwise(edges))
    keys = (case.k[a:z], case.v[a:z])
    dout = case.q[a:z].flip(0)

    def gradients(rows: slice, ranges: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        q, o, mass, at, e = (t[rows].contiguous() for t in (case.q[a:z], out[a:z], lse[a:z], case.positions[a:z], dout))
        first = torch.tensor([0, q.shape[0]], device=q.device)
        return attention.packed_gradients(e, q, *keys, o, mass, at, first, (0, n), [ranges])

    dq, dkv = gradients(slice(0, n), slices)
    parts = [gradients(slice(a, z), [(0, z - a)]) for a, z in slices]
    apart, leaves = torch.cat([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    assert len(leaves) == VIRTUAL
    chain = leaves[0]
    for leaf in leaves[1:]:
        chain = chain + leaf
    require(not torch.equal(chain, dkv), "attention", "the probe of its gradients is not sensitive to order")
    require(torch.equal(apart, dq), "attention", "the gradient of a query depends on other rows")
    require(torch.equal(tree_sum(leaves), dkv), "attention", "gradients of keys depend on who holds a slice")
