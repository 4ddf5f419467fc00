"""The part of the start-up proof that depends on sizes: the very weights of a model, at many numbers of rows.

A library picks a kernel by M, N and K. cuBLAS left the chain for one weight of five, and for few rows only, where a
process that had only run large batches would not have noticed: so every weight is tried at every kind of row count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlk.kernels import gemm
from rlk.kernels.forms import form
from rlk.kernels.requirement import require
from rlk.kernels.tree import VIRTUAL, tree_sum

ROWS = (
    1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 192, 224, 255, 256, 257,
    384, 512, 513, 768, 1000, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip
"""Row counts on both sides of every power of two, where libraries change tiles."""


@dataclass(frozen=True)
class Product:
    """A weight as this process holds it: S virtual shards [N, K]; column-parallel, or row-parallel (a leaf a shard).

    rows: the most rows that it is multiplied with. backward: input and weight gradients are needed too.
    """

    name: str
    shards: int
    n: int
    k: int
    row_parallel: bool
    rows: int
    backward: bool = False


def check(products: Sequence[Product], device: torch.device) -> list[str]:
    """Proves each product; returns a sentence each.

    Raises:
        ProofError: names the weight and the number of rows.
    """
    return [_check(p, device) for p in products]


def _check(p: Product, device: torch.device) -> str:
    generator = torch.Generator(device).manual_seed(21)

    def spread(*shape: int) -> torch.Tensor:
        sizes = torch.randn(shape, generator=generator, device=device).exp()
        return (torch.randn(shape, generator=generator, device=device) * sizes).to(torch.bfloat16)

    counts = sorted({min(m, p.rows) for m in ROWS})
    w = spread(p.shards, p.n, p.k)
    if p.row_parallel:
        _row(p, w, spread(counts[-1], p.shards, p.k), spread(counts[-1], p.n), counts)
    else:
        _column(p, w, spread(counts[-1], p.k), spread(counts[-1], p.shards, p.n), counts)
    ways = "forward and backward" if p.backward else "forward"
    return f"{p.name} {p.shards} x [{p.n}, {p.k}] at {len(counts)} row counts up to {counts[-1]}, {ways}"


def _column(p: Product, w: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, counts: list[int]) -> None:
    flat = w.flatten(0, 1)
    expected = _chain(x, flat)
    _sensitive(p, expected, _chain(x[:64].flip(1), flat.flip(1)))
    rounded, prepared = gemm.round_bf16(expected), gemm.prepare(flat)
    if p.backward:
        leaves = torch.stack([_chain(dy[:, s].contiguous(), w[s].t().contiguous()) for s in range(p.shards)])
        subtree = tree_sum(leaves)
    for m in counts:
        _same(p, m, "forward", gemm.linear(x[:m], prepared), rounded[:m])
        if p.backward:
            _same(p, m, "input gradient", gemm.column_input_leaves(dy[:m], w), subtree[:m])
    if p.backward:
        _weight_gradient(p, dy.flatten(1), x[:, None])


def _row(p: Product, w: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, counts: list[int]) -> None:
    leaves = torch.stack([_chain(x[:, s].contiguous(), w[s]) for s in range(p.shards)])
    _sensitive(p, leaves[0], _chain(x[:64, 0].flip(1), w[0].flip(1)))
    subtree, prepared = tree_sum(leaves), gemm.prepare(w)
    whole = gemm.round_bf16(subtree) if p.shards == VIRTUAL else None
    if p.backward:
        chains = torch.stack([_chain(dy, w[s].t().contiguous()) for s in range(p.shards)], 1)
        rounded = gemm.round_bf16(chains)
    for m in counts:
        _same(p, m, "forward", gemm.row_leaves(x[:m], prepared), subtree[:m])
        if whole is not None:
            _same(p, m, "rounded forward", gemm.row_linear(x[:m], prepared), whole[:m])
        if p.backward:
            _same(p, m, "input gradient", gemm.row_inputs(dy[:m], w), rounded[:m])
    if p.backward:
        _weight_gradient(p, dy, x)


def _weight_gradient(p: Product, dy: torch.Tensor, x: torch.Tensor) -> None:
    """Two samples whose slices have no, one, a few and many tokens, none a multiple of 16; x [T, S, K]."""
    most = min(p.rows, 301)
    edges = [min(e, most) for e in (0, 0, 1, 6, 6 + most // 3)]
    slices = [list(zip(edges, [*edges[1:], most], strict=True))[:4], [(0, most), (0, 0), (1, most), (most, most)]]
    found = gemm.row_weight_gradients(dy[:most], x[:most], slices)
    for sample, ranges in zip(found, slices, strict=True):
        for shard in range(x.shape[1]):
            leaves = [_chain(dy[a:z].t().contiguous(), x[a:z, shard].t().contiguous()) for a, z in ranges]
            _same(p, most, "weight gradient", sample[shard], tree_sum(torch.stack(leaves)))


def check_trees(probe_rows: Callable[[int, int, torch.device], torch.Tensor], device: torch.device) -> None:
    """Products that sum leaves themselves give the tree over plain chains, whoever holds how many of them."""
    k, n = (32, 48) if device.type == "cpu" else (128, 256)
    x, w = (probe_rows(rows, VIRTUAL * k, device).view(rows, VIRTUAL, k) for rows in (70, n))
    shards = w.transpose(0, 1).contiguous()
    chains = torch.stack([_chain(x[:, s].contiguous(), shards[s]) for s in range(VIRTUAL)])
    for held in (1, 2, 4, 8):
        for m in (1, 70):
            found = gemm.row_leaves(x[:m, :held], gemm.prepare(shards[:held]))
            same = torch.equal(found, tree_sum(chains[:held, :m]))
            require(same, "tree", f"a product over {held} leaves and {m} rows is not the tree over its chains")


def _chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    chain: torch.Tensor = form("gemm", x).plain_chain(x, w)
    return chain


def _sensitive(p: Product, expected: torch.Tensor, flipped: torch.Tensor) -> None:
    require(not torch.equal(flipped, expected[:64]), "gemm", f"the probe of {p.name} is not sensitive to order")


def _same(p: Product, m: int, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected):
        differ = int((found != expected).sum())
        where = f"{p.name} {p.shards} x [{p.n}, {p.k}] at M {m}"
        require(False, "gemm", f"{where}: {differ} of {found.numel()} elements of the {what} leave the plain chain")
