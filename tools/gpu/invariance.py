"""What may not change a bit: neighbours, batches, pages, chunks, tiles, graphs, and who holds which shard or slice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import torch

from rlk.kernels import attention, gemm, pointwise
from rlk.kernels.cuda import attention as cuda_attention
from rlk.kernels.cuda import choice
from rlk.kernels.cuda import gemm as cuda_gemm
from rlk.kernels.cuda.gemm import Tile
from rlk.kernels.tree import tree_sum
from rlk.model.slices import slice_positions
from tools.gpu.data import ATTENTIONS, DEVICE, chosen, equal, integers, moved, normal, spread
from tools.gpu.report import Report

HEADS = ((32, 8), (16, 8), (4, 1))
LENGTH = 3000


def run(report: Report) -> None:
    """Each property is an entry."""
    for name in ATTENTIONS:
        for heads, kv_heads in HEADS:
            size = f"{name}, {heads}/{kv_heads}"
            with chosen(RLK_ATTENTION=name):
                report.check(f"attention forward {size}", lambda a=heads, b=kv_heads: _forward(a, b))
                report.check(f"attention backward {size}", lambda a=heads, b=kv_heads: _backward(a, b))
    report.check("attention, other tiles (counts are facts, not demands)", _other_rows)
    report.check("attention backward, other tiles", _other_leaf_tiles)
    report.check("product tiles", _product_tiles)
    report.check("tree tiles", _tree_tiles)
    report.check("weight gradient tiles", _slice_tiles)
    report.check("zeros of a library's product (counts are facts, not demands)", _signed_zeros)
    for name, core in (("cublas", ATTENTIONS[0]), ("triton", "triton")):
        with chosen(RLK_GEMM=name, RLK_ATTENTION=core):
            report.check(f"graph replay, RLK_GEMM={name} RLK_ATTENTION={core}", _graph)


def _sequence(heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (
        normal(LENGTH, h, 128, seed=s, scale=c) for s, h, c in ((1, heads, 2), (2, kv_heads, 1), (3, kv_heads, 1))
    )
    return q, k, v, torch.arange(LENGTH, device=DEVICE), torch.tensor([0, LENGTH], device=DEVICE)


def _pages_of(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = -(-LENGTH // page)
    generator = torch.Generator().manual_seed(4)
    names = torch.randperm(n, generator=generator).to(DEVICE) + 1
    cache = torch.full((n + 1, k.shape[1], page, 256), float("nan"), device=DEVICE).to(torch.bfloat16)
    at = torch.arange(LENGTH, device=DEVICE)
    attention.write_pages(k, v, cache, names[at // page] * page + at % page)
    return cache, names.to(torch.int32)[None]


def _forward(heads: int, kv_heads: int) -> str:
    q, k, v, positions, ends = _sequence(heads, kv_heads)
    base, lse = attention.packed(q, k, v, positions, ends, ends)
    two, keys = torch.tensor([0, 77, 77 + LENGTH], device=DEVICE), (torch.cat([t[:77], t]) for t in (k, v))
    packed = attention.packed(torch.cat([q[:77], q]), *keys, torch.cat([positions[:77], positions]), two, two)
    equal(packed[0][77:], base, "second in a pack")
    equal(packed[0][:77], base[:77], "first in a pack")
    equal(packed[1][77:], lse, "log-sum-exp")
    mine = torch.tensor([p for j in (0, 5) for p in slice_positions(j, LENGTH)], device=DEVICE)
    some = attention.packed(q[mine], k, v, mine, torch.tensor([0, len(mine)], device=DEVICE), ends)
    equal(some[0], base[mine], "two virtual slices")
    for page in (16, 64) if choice.chosen("RLK_ATTENTION") == "fa3" else (16, 64, 128):
        cache, table = _pages_of(k, v, page)

        def rows(a: int, z: int, cache: torch.Tensor = cache, table: torch.Tensor = table) -> torch.Tensor:
            first, length = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, z - a], [z]))
            return attention.paged(q[a:z], cache, table, first, length)

        equal(rows(0, LENGTH), base, f"prefill, pages of {page}")
        for a, z in ((0, 256), (256, 512), (1000, 1777), (2900, 3000), (5, 6), (1023, 1024), (2999, 3000)):
            equal(rows(a, z), base[a:z], f"rows {a} to {z}, pages of {page}")
        at = torch.tensor([10, 63, 64, 129, 800, 1601, 2998] * 9, device=DEVICE)
        first = torch.arange(len(at) + 1, dtype=torch.int32, device=DEVICE)
        many = attention.paged(q[at], cache, table.expand(len(at), -1).contiguous(), first, at.to(torch.int32) + 1)
        equal(many, base[at], f"decode of {len(at)}, pages of {page}")
    return "packed, sliced, prefill, chunks and decode"


def _backward(heads: int, kv_heads: int) -> str:
    q, k, v, _, ends = _sequence(heads, kv_heads)
    order = [slice_positions(j, LENGTH) for j in range(8)]
    at = torch.tensor([p for part in order for p in part], device=DEVICE)
    edges = torch.tensor([0, *[len(p) for p in order]]).cumsum(0).tolist()
    ranges = list(pairwise(edges))
    out, lse = attention.packed(q[at], k, v, at, ends, ends)
    dout = normal(LENGTH, heads, 128, seed=5)
    whole = attention.packed_gradients(dout, q[at], k, v, out, lse, at, ends, (0, LENGTH), [ranges])
    for size in (2, 8):
        dqs, dkvs = [], []
        for part in range(size):
            mine = ranges[part * 8 // size : (part + 1) * 8 // size]
            a, z = mine[0][0], mine[-1][1]
            first = torch.tensor([0, z - a], device=DEVICE)
            own = [(x - a, y - a) for x, y in mine]
            rows = (dout[a:z], q[at[a:z]], k, v, out[a:z], lse[a:z], at[a:z], first, (0, LENGTH), [own])
            dq, dkv = attention.packed_gradients(*rows)
            dqs.append(dq)
            dkvs.append(dkv)
        equal(torch.cat(dqs), whole[0], f"dq, {size} holders of the slices")
        equal(tree_sum(torch.stack(dkvs)), whole[1], f"dk and dv, {size} holders of the slices")
    again = attention.packed_gradients(dout, q[at], k, v, out, lse, at, ends, (0, LENGTH), [ranges])
    equal(again[1], whole[1], "run to run")
    return "slices held by 1, 2 and 8 ranks"


def _other_rows() -> dict[str, int]:
    q, k, v, positions, ends = _sequence(32, 8)
    base, _ = attention.packed(q, k, v, positions, ends, ends)
    found = {}
    for rows in (16, 32, 128):
        with mock.patch.object(cuda_attention, "ROWS", rows):
            found[f"rows {rows}"] = moved(attention.packed(q, k, v, positions, ends, ends)[0], base)
    return found


def _other_leaf_tiles() -> str:
    q, k, v, positions, ends = _sequence(32, 8)
    out, lse = attention.packed(q, k, v, positions, ends, ends)
    args = (
        q.flip(0),
        q,
        k,
        v,
        out,
        lse,
        positions,
        ends,
        (0, LENGTH),
        [[(0, 700), (700, 1501), (1501, 1502), (1502, LENGTH)]],
    )
    dq, dkv = attention.packed_gradients(*args)
    for rows, keys in ((64, 64), (32, 64), (64, 128), (16, 64)):
        with mock.patch.multiple(cuda_attention, LEAF_ROWS=rows, LEAF_KEYS=keys):
            equal(attention.packed_gradients(*args)[1], dkv, f"leaves, {rows} rows by {keys} keys")
    with mock.patch.object(cuda_attention, "ROWS", 128):
        equal(attention.packed_gradients(*args)[0], dq, "dq, 128 rows")
    return "leaves in five tiles, dq in two"


TILES = (
    Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 3), Tile(64, 64, 32, 4, 3),
    Tile(128, 64, 128, 8, 3), Tile(32, 64, 64, 4, 3), Tile(16, 128, 128, 4, 3), Tile(64, 16, 128, 4, 4),
    Tile(128, 32, 64, 4, 3),
)  # fmt: skip


def _product_tiles() -> str:
    x, w = spread(300, 4096, seed=6), spread(1536, 4096, seed=7)
    expected = cuda_gemm.plain_chain(x, w)
    for left, right, what in ((x, w.t(), "as written"), (w, x.t(), "operands swapped")):
        for tile in TILES:
            out = torch.empty(left.shape[0], right.shape[1], device=DEVICE)
            cuda_gemm.product(left[None], right[None], out[None], tile=tile)
            equal(out if left is x else out.t(), expected, f"{tile}, {what}")
    dx = cuda_gemm.plain_chain(x[:, :1536].contiguous(), w.t().contiguous())
    for tile in TILES[:5]:
        out = torch.empty(300, 4096, device=DEVICE)
        cuda_gemm.product(x[None, :, :1536], w[None], out[None], tile=tile)
        equal(out, dx, f"{tile}, right operand by rows")
    return f"{len(TILES)} tiles, operands swapped or not, either layout of the right one"


def _tree_tiles() -> str:
    x, w = spread(300, 8, 512, seed=8), spread(8, 1024, 512, seed=9)
    leaves = torch.stack([cuda_gemm.plain_chain(x[:, s].contiguous(), w[s]) for s in range(8)])
    expected = tree_sum(leaves)
    for tile in (Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 8, 3)):
        for each in (1, 2, 4, 8):
            out = torch.empty(8 // each, 300, 1024, device=DEVICE)
            cuda_gemm.product(x.transpose(0, 1), w.transpose(1, 2), out, tile=tile)
            equal(tree_sum(out), expected, f"{tile}, {each} leaves in registers")
    for name in ("cublas", "triton"):
        with chosen(RLK_TREE=name):
            equal(gemm.row_leaves(x, gemm.prepare(w)), expected, name)
            equal(gemm.row_linear(x, gemm.prepare(w)), gemm.round_bf16(expected), f"{name}, rounded")
    chain = leaves[0]
    for leaf in leaves[1:]:
        chain = chain + leaf
    if not moved(chain, expected):
        raise AssertionError("the probe is not sensitive to order")
    return "4 tiles, 1 to 8 leaves in registers, and cuBLAS"


def _slice_tiles() -> str:
    dy, x = spread(777, 640, seed=10), spread(777, 1024, seed=11)
    edges = [0, 100, 101, 101, 190, 222, 223, 250, 290, 300, 350, 513, 514, 600, 700, 701, 777]
    ranges = list(pairwise(edges))
    slices = [ranges[:8], ranges[8:]]
    found = gemm.weight_gradients(dy, x, slices)
    for sample, ranges in zip(found, slices, strict=True):
        leaves = [cuda_gemm.plain_chain(dy[a:z].t(), x[a:z].t()) for a, z in ranges]
        equal(sample, tree_sum(torch.stack(leaves)), "plain chains")
        for held in (1, 2, 4):
            part = gemm.weight_gradients(dy, x, [ranges[:held]])[0]
            equal(part, tree_sum(torch.stack(leaves[:held])), f"{held} slices held")
    for tile in (Tile(128, 64, 16, 8, 3), Tile(128, 64, 64, 8, 3), Tile(64, 64, 32, 4, 3), Tile(64, 128, 32, 8, 3)):
        with mock.patch.object(cuda_gemm, "SLICES", tile):
            equal(gemm.weight_gradients(dy, x, slices), found, str(tile))
    return "plain chains and five tiles"


def _signed_zeros() -> dict[str, int]:
    """Rows of zeros of both signs, and products that underflow: which of them a library's own rounding leaves at -0."""
    x, w = normal(64, 4096, seed=12), -normal(512, 4096, seed=13).abs()
    x[:16], x[16:32] = 0.0, -0.0
    tiny = torch.full((16, 4096), 1e-30, device=DEVICE).to(torch.bfloat16)
    x[32:48] = tiny * 1e-9
    found = {}
    for name in ("cublas", "cublas-fp32", "triton"):
        with chosen(RLK_GEMM=name):
            found[name] = int((integers(gemm.linear(x, gemm.prepare(w))) == -0x8000).sum())
    return found


def _graph() -> str:
    """A decode step's ops captured once and replayed on other inputs."""
    rows, hidden = 16, 4096
    _, k, v, _, _ = _sequence(32, 8)
    cache, table = _pages_of(k, v, 16)
    tables = table.expand(rows, -1).contiguous()
    first, lengths = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE), torch.full((rows,), 1, device=DEVICE)
    lengths = lengths.to(torch.int32)
    gain, wq = normal(hidden, seed=14), normal(hidden, hidden, seed=15, scale=1 / 64)
    wo, cos = normal(8, hidden, 512, seed=16, scale=1 / 64), torch.rand(LENGTH, 64, device=DEVICE)
    x, positions = normal(rows, hidden, seed=17), torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def step() -> torch.Tensor:
        h, _ = pointwise.rmsnorm(x, gain, 1e-6)
        heads = gemm.linear(h, gemm.prepare(wq)).view(rows, 32, 128)
        heads = pointwise.rope(heads, cos, cos, positions)
        a = attention.paged(heads, cache, tables, first, lengths)
        return pointwise.add(x, gemm.row_linear(a.view(rows, 8, 512), gemm.prepare(wo)))

    replay = _captured(step)
    for seed, length in ((18, 7), (19, 64), (20, 2500)):
        x.copy_(normal(rows, hidden, seed=seed))
        lengths.fill_(length)
        positions.fill_(length - 1)
        equal(replay(), step(), f"length {length}")
    return "norm, product, rotation, paged attention, tree and sum"


def _captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    taken = torch.cuda.CUDAGraph()
    with torch.cuda.graph(taken):
        out = step()

    def replay() -> torch.Tensor:
        taken.replay()
        return out.clone()

    return replay
