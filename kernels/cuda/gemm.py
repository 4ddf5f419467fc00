"""CUDA form of the matrix products. See rlk.kernels.cuda.choice for which library runs what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk.kernels.cuda import choice, launch
from rlk.kernels.cuda.programs import gemm as programs
from rlk.kernels.cuda.programs.weight_gradient import weight_gradients as weight_gradients_program
from rlk.kernels.cuda.tree import round_bf16, tree

__all__ = ["round_bf16"]  # part of this form; lives with the tree

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
FEW_ROWS = 64
"""Up to here a weight's rows go where a tile is tall, since a tensor-core tile is at least 64 high."""


@dataclass(frozen=True)
class Tile:
    """How a Triton product is cut: free, since no element's chain depends on it."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    leaves: int = 8
    """Most leaves of a tree that one program sums in registers; the rest of the tree is another kernel's."""


MANY = Tile(128, 128, 64, 8, 3)
MANY_TREE = Tile(128, 128, 64, 8, 3, 4)
"""A tile of 128 x 128 holds the partials of four leaves at most."""
FEW_TREE_LEAVES = 1
"""Few rows are few programs: a leaf each keeps all processors busy."""
SLICES = Tile(128, 128, 32, 8, 3)
"""Weight gradients: tokens are the inner axis, and short; with four partials it just fits in the registers."""


def tile_of(rows: int, leaves: int) -> Tile:
    """The tile of a product with `rows` rows and `leaves` leaves an element."""
    if launch.INTERPRETED:
        return Tile(32, 32, 16, 1, 1)
    if rows <= FEW_ROWS:
        return Tile(64, max(16, launch.power(rows)), 128, 4, 4, FEW_TREE_LEAVES)
    return MANY if leaves == 1 else MANY_TREE


def describe() -> str:
    """Which implementation runs."""
    return (
        f"{launch.PLACE}: {choice.describe('RLK_GEMM')}; trees: {choice.describe('RLK_TREE')}; "
        "continued chains and weight gradients: Triton"
    )


def prepare(w: torch.Tensor) -> torch.Tensor:
    """The transpose, as a view: nothing is copied, so nothing is to be renewed when the weight changes."""
    return w.transpose(-1, -2)


def chain(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """a [M, K] times b [K, N], any strides, fp32, continuing the chain of `into` where given."""
    _operands(a, b)
    if into is None and choice.chosen("RLK_GEMM") != "triton":
        return torch.mm(a, b, out_dtype=F32)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=F32) if into is None else launch.take(into, F32, contiguous=False)
    product(a[None], b[None], out[None], keep=into is not None)
    return out


def linear(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """x [M, K] times a prepared weight [K, N], bf16 [M, N]."""
    _operands(x, prepared)
    name = choice.chosen("RLK_GEMM")
    if name == "cublas":
        return torch.mm(x, prepared)
    if name == "cublas-fp32":
        return round_bf16(torch.mm(x, prepared, out_dtype=F32))
    out = x.new_empty(x.shape[0], prepared.shape[1])
    product(x[None], prepared[None], out[None])
    return out


def row_inputs(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.gemm. Each shard's product is written where it belongs."""
    _operands(dy, w)
    (m, n), (shards, _, k) = dy.shape, w.shape
    out, left = dy.new_empty(m, shards, k), dy.expand(shards, m, n)
    by_shard, name = out.transpose(0, 1), choice.chosen("RLK_GEMM")
    if name == "cublas":
        torch.bmm(left, w, out=by_shard)
    elif name == "cublas-fp32":
        by_shard.copy_(round_bf16(torch.bmm(left, w, out_dtype=F32)))
    else:
        product(left, w, by_shard)
    return out


def leaves_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, S, K] times b [S, K, N]: a leaf a shard, the tree over the S leaves; fp32 [M, N]."""
    return tree(_leaves(a, b), F32)


def row_linear(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.gemm: the rounding belongs to the kernel that finishes the tree."""
    return tree(_leaves(x, prepared), BF16)


def _leaves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Partials [P, M, N] fp32 over which only the tree is left."""
    _operands(a, b)
    (m, shards, _), n = a.shape, b.shape[2]
    left = a.transpose(0, 1)
    if choice.chosen("RLK_TREE") == "cublas":
        return torch.bmm(left, b, out_dtype=F32)
    out = a.new_empty(shards // min(tile_of(m, shards).leaves, shards), m, n, dtype=F32)
    product(left, b, out)
    return out


def weight_gradients(dy: torch.Tensor, x: torch.Tensor, slices: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """See rlk.kernels.gemm."""
    return row_weight_gradients(dy, x[:, None], slices)[:, 0]


def row_weight_gradients(
    dy: torch.Tensor, x: torch.Tensor, slices: Sequence[Sequence[tuple[int, int]]]
) -> torch.Tensor:
    """See rlk.kernels.gemm: one launch for all samples, slices and shards of a micro-batch."""
    n, (_, shards, k) = dy.shape[1], x.shape
    for t in (dy, x):
        launch.take(t, BF16, contiguous=False)
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            raise TypeError(f"a token's row must be contiguous, got strides {t.stride()}")
    edges = launch.ranges(slices, dy.device)
    out = dy.new_empty(len(slices), shards, n, k, dtype=F32)
    tile = Tile(32, 32, 16, 1, 1) if launch.INTERPRETED else SLICES
    grid = (launch.tiles(n, tile.rows) * launch.tiles(k, tile.columns) * shards, len(slices))
    even = {"EVEN_M": n % tile.rows == 0, "EVEN_N": k % tile.columns == 0}
    for first in range(0, edges.shape[1], 4):
        part = edges[:, first : first + 4]
        launch.run(
            weight_gradients_program, grid, dy, x, part, out, n, k, shards, dy.stride(0), x.stride(0),
            0 if shards == 1 else x.stride(1), edges.stride(0), SLICES=part.shape[1], BM=tile.rows, BN=tile.columns,
            BT=tile.inner, GROUP=8, **even, ADD=first > 0, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
    return out


def plain_chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[M, N] fp32 of x [M, K] and w [N, K]: the definition that every implementation above is held to."""
    x, w = launch.take(x.contiguous(), BF16), launch.take(w.contiguous(), BF16)
    (m, k), n = x.shape, w.shape[0]
    out = x.new_empty(m, n, dtype=F32)
    grid = (launch.tiles(m, 64), launch.tiles(n, 64))
    launch.run(programs.plain_chain, grid, x, w, out, m, n, k, k, k, B=64, stages=1)
    return out


def product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, keep: bool = False, tile: Tile | None = None
) -> None:
    """out [P, M, N] of a [L, M, K] and b [L, K, N], any strides: out[p] is the tree over its L / P leaves.

    A bf16 `out` is rounded once; `keep` continues the chains that an fp32 `out` holds.
    """
    (leaves, m, k), n, parts = a.shape, b.shape[2], out.shape[0]
    t = tile or tile_of(m, leaves)
    few = m <= FEW_ROWS and tile is None
    if few:
        a, b, out, m, n = b.transpose(1, 2), a.transpose(1, 2), out.transpose(1, 2), n, m
    launch.run(
        programs.product, (launch.tiles(m, t.rows) * launch.tiles(n, t.columns), parts), a, b, out, m, n, k,
        *_strides(a), *_strides(b), *_strides(out), LEAVES=leaves // parts, BM=t.rows, BN=t.columns, BK=t.inner,
        GROUP=8, EVEN_M=few and m % t.rows == 0, EVEN_N=not few and n % t.columns == 0, EVEN=k % t.inner == 0,
        CONTINUE=keep, ROUND=out.dtype == BF16, warps=t.warps, stages=t.stages,
    )  # fmt: skip


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """A first axis of one has no stride: M * K there would compile the program anew for odd row counts."""
    return (0 if t.shape[0] == 1 else t.stride(0), t.stride(1), t.stride(2))


def _operands(a: torch.Tensor, b: torch.Tensor) -> None:
    launch.take(a, BF16, contiguous=False)
    launch.take(b, BF16, contiguous=False)
