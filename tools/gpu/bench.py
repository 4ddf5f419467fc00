"""Median times of ours beside the ordinary op, on the same random data; the L2 is flushed between repetitions.

A first look, to see where the time goes. The library runs with split-K off here too, as the whole process does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from triton.testing import do_bench, do_bench_cudagraph

from rlk.kernels import attention, gemm, pointwise, policy, state
from rlk.kernels.cuda import gemm as cuda_gemm
from rlk.kernels.cuda.gemm import Tile
from rlk.kernels.policy import RowParams
from rlk.kernels.state import AdamStep
from tools.gpu.data import DEVICE, VOCAB, chosen, normal
from tools.gpu.report import Report

Call = Callable[[], Any]


def run(report: Report) -> None:
    """One entry an op and size: microseconds of each variant."""
    parts: list[Callable[[], None]] = []
    for m in (16, 64, 2048, 8192):
        parts += [partial(_product, report, m, *size) for size in (("qkv", 6144), ("gate_up", 24576))]
    for m in (16, 64, 2048):
        parts += [partial(_row_product, report, m, *size) for size in (("o", 512), ("down", 1536))]
    parts += [partial(_column_input, report, 2048, *size) for size in (("qkv", 768), ("gate_up", 3072))]
    parts.append(partial(_row_input, report, 2048))
    parts += [partial(_weight_gradient, report, *size) for size in ((4, 1024), (16, 256))]
    parts += [partial(part, report, n) for part in (_prefill, _attention_backward) for n in (2048, 8192)]
    parts += [partial(_decode, report, *size) for size in ((32, 4096), (64, 1024), (8, 16384))]
    parts += [partial(_pointwise, report, rows) for rows in (64, 8192)]
    parts += [partial(_leaves, report), *(partial(_policy, report, rows) for rows in (64, 1024, 4096))]
    parts.append(partial(_state, report))
    for part in parts:
        report.check(f"{part.func.__name__.strip('_')} {part.args[1:]} ran", part)  # type: ignore[attr-defined]


def _measure(report: Report, name: str, ordinary: Call | None, ours: dict[str, Call]) -> None:
    def micro(call: Call) -> float:
        return round(float(do_bench(call, warmup=10, rep=40, return_mode="median")) * 1e3, 1)

    times = {f"{key}_us": micro(call) for key, call in ours.items()}
    if ordinary is not None:
        base = micro(ordinary)
        times |= {"best_ratio": round(base / min(times.values()), 2), "ordinary_us": base}
    report.add(name, None, **times)


def _in_graph(report: Report, name: str, ours: dict[str, Call]) -> None:
    """As a decode step runs them: no launch overhead, but weights that the L2 may hold."""
    times = {f"{k}_us": round(float(do_bench_cudagraph(c, return_mode="median")) * 1e3, 1) for k, c in ours.items()}
    report.add(f"{name}, in a graph", None, **times)


def _with(names: dict[str, str], call: Call) -> Call:
    def measured() -> Any:
        with chosen(**names):
            return call()

    return measured


def _product(report: Report, m: int, name: str, n: int) -> None:
    x, w = normal(m, 4096, seed=1), normal(n, 4096, seed=2, scale=1 / 64)
    p, out = gemm.prepare(w), torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
    ours = {c: _with({"RLK_GEMM": c}, lambda: gemm.linear(x, p)) for c in ("cublas", "cublas-fp32", "triton")}
    if m > 64:
        ours["128x256"] = lambda: cuda_gemm.product(x[None], p[None], out[None], tile=Tile(128, 256, 64, 8, 3))
    _measure(report, f"column product {name}, M {m}", lambda: torch.mm(x, w.t()), ours)


TREE_TILES = {
    "128x64_8": (Tile(128, 64, 64, 8, 3), 8), "128x64_4": (Tile(128, 64, 64, 8, 3), 4),
    "128x64_8_deep": (Tile(128, 64, 64, 8, 4), 8), "128x64_bk128_4": (Tile(128, 64, 128, 8, 3), 4),
    "128x128_4": (Tile(128, 128, 64, 8, 3), 4), "128x128_2": (Tile(128, 128, 64, 8, 3), 2),
    "64x128_8": (Tile(64, 128, 64, 8, 3), 8), "128x256_1": (Tile(128, 256, 64, 8, 3), 1),
}  # fmt: skip
"""A tile, and how many leaves a program sums in registers."""


def _tree_with(x: torch.Tensor, p: torch.Tensor, tile: Tile, each: int) -> torch.Tensor:
    out = torch.empty(8 // each, x.shape[0], p.shape[2], device=DEVICE)
    cuda_gemm.product(x.transpose(0, 1), p, out, tile=tile)
    return cuda_gemm.tree(out, torch.bfloat16)


def _row_product(report: Report, m: int, name: str, k: int) -> None:
    x, w = normal(m, 8, k, seed=3), normal(8, 4096, k, seed=4, scale=1 / 64)
    p, flat, whole = gemm.prepare(w), x.flatten(1), w.transpose(0, 1).reshape(4096, -1)
    ours = {c: _with({"RLK_TREE": c}, lambda: gemm.row_linear(x, p)) for c in ("cublas", "triton")}
    if m > 64:
        ours |= {key: partial(_tree_with, x, p, *cut) for key, cut in TREE_TILES.items()}
    _measure(report, f"row product {name}, M {m}", lambda: torch.mm(flat, whole.t()), ours)
    if m <= 64:
        _in_graph(report, f"row product {name}, M {m}", {**ours, "ordinary": lambda: torch.mm(flat, whole.t())})


def _column_input(report: Report, m: int, name: str, n: int) -> None:
    dy, w = normal(m, 8, n, seed=5), normal(8, n, 4096, seed=6, scale=1 / 64)
    flat, whole = dy.flatten(1), w.flatten(0, 1)
    ours = {c: _with({"RLK_TREE": c}, lambda: gemm.column_input_leaves(dy, w)) for c in ("triton", "cublas")}
    ours["128x128_4"] = partial(_tree_with, dy, w, Tile(128, 128, 64, 8, 3), 4)
    _measure(report, f"column input gradient {name}, M {m}", lambda: torch.mm(flat, whole), ours)


def _row_input(report: Report, m: int) -> None:
    dy, w = normal(m, 4096, seed=7), normal(8, 4096, 1536, seed=8, scale=1 / 64)
    whole = w.transpose(0, 1).reshape(4096, -1)
    ours = {c: _with({"RLK_GEMM": c}, lambda: gemm.row_inputs(dy, w)) for c in ("cublas", "triton")}
    _measure(report, f"row input gradient down, M {m}", lambda: torch.mm(dy, whole), ours)


def _weight_gradient(report: Report, samples: int, length: int) -> None:
    t, n, k, cut = samples * length, 6144, 4096, length // 8
    dy, x = normal(t, n, seed=9), normal(t, k, seed=10)
    slices = [[(s * length + i * cut, s * length + (i + 1) * cut) for i in range(8)] for s in range(samples)]

    def ours(tile: Tile) -> torch.Tensor:
        with mock.patch.object(cuda_gemm, "SLICES", tile):
            return gemm.weight_gradients(dy, x, slices)

    tiles = (cuda_gemm.SLICES, Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 8, 3), Tile(64, 64, 32, 4, 4))
    variants = {f"{c.rows}x{c.columns}x{c.inner}": partial(ours, c) for c in tiles}
    name = f"weight gradient qkv, {samples} samples of {length}, fp32 a sample against one bf16 product"
    _measure(report, name, lambda: torch.mm(dy.t(), x), variants)


def _heads(n: int, *seeds: int) -> tuple[torch.Tensor, ...]:
    return tuple(normal(n, h, 128, seed=s) for s, h in zip(seeds, (32, 8, 8, 32), strict=False))


def _prefill(report: Report, n: int) -> None:
    q, k, v = _heads(n, 11, 12, 13)
    ends, positions = torch.tensor([0, n], device=DEVICE), torch.arange(n, device=DEVICE)
    heads = [t.transpose(0, 1)[None].contiguous() for t in (q, k, v)]
    _measure(
        report,
        f"attention prefill, {n} tokens",
        lambda: functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True),
        {"triton": lambda: attention.packed(q, k, v, positions, ends, ends)},
    )


def _attention_backward(report: Report, n: int) -> None:
    q, k, v, dout = _heads(n, 16, 17, 18, 19)
    ends, positions = torch.tensor([0, n], device=DEVICE), torch.arange(n, device=DEVICE)
    out, lse = attention.packed(q, k, v, positions, ends, ends)
    slices = [[(i * n // 8, (i + 1) * n // 8) for i in range(8)]]
    heads = [t.transpose(0, 1)[None].contiguous().requires_grad_() for t in (q, k, v)]
    theirs = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    upstream = dout.transpose(0, 1)[None].contiguous()
    args = (dout, q, k, v, out, lse, positions, ends, ends, slices)
    _measure(
        report,
        f"attention backward, {n} tokens",
        lambda: torch.autograd.grad(theirs, heads, upstream, retain_graph=True),
        {"triton": lambda: attention.packed_gradients(*args)},
    )


def _decode(report: Report, rows: int, length: int) -> None:
    pages = length // 16
    cache = normal(rows * pages, 8, 16, 256, seed=14)
    table = torch.randperm(rows * pages, device=DEVICE).to(torch.int32).view(rows, pages)
    q, first = normal(rows, 32, 128, seed=15), torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    name, read = f"attention decode, {rows} of {length} tokens", rows * length * 8 * 256 * 2
    _measure(report, name, None, {"triton": lambda: attention.paged(q, cache, table, first, lengths)})
    report.add(f"{name}: bytes of keys and values", None, bytes=read, us_at_4300_gb_s=round(read / 4.3e6, 1))


def _pointwise(report: Report, rows: int) -> None:
    x, w, dy = normal(rows, 4096, seed=20), normal(4096, seed=21), normal(rows, 4096, seed=22)
    heads, gain, gate_up = normal(rows, 32, 128, seed=23), normal(128, seed=24), normal(rows, 8, 3072, seed=25)
    _, rstd = pointwise.rmsnorm(x, w, 1e-6)
    tables, positions = torch.rand(16384, 64, device=DEVICE), torch.arange(rows, device=DEVICE)
    gate, up = gate_up.chunk(2, 2)
    dense = gate.contiguous()
    cases: list[tuple[str, Call | None, Call]] = [
        ("rmsnorm", lambda: functional.rms_norm(x, (4096,), w, 1e-6), lambda: pointwise.rmsnorm(x, w, 1e-6)),
        ("rmsnorm backward", None, lambda: pointwise.rmsnorm_backward(dy, x, w, rstd, dy)),
        (
            "32 head norms",
            lambda: functional.rms_norm(heads, (128,), gain, 1e-6),
            lambda: pointwise.rmsnorm(heads, gain, 1e-6),
        ),
        ("32 rotations", None, lambda: pointwise.rope(heads, tables, tables, positions)),
        ("swiglu", lambda: functional.silu(gate) * up, lambda: pointwise.swiglu(gate_up)),
        ("swiglu backward", None, lambda: pointwise.swiglu_backward(dense, gate_up)),
        ("sum", lambda: x + dy, lambda: pointwise.add(x, dy)),
    ]
    for name, ordinary, ours in cases:
        _measure(report, f"{name}, {rows} rows", ordinary, {"triton": ours})
        if rows <= 64:
            _in_graph(report, f"{name}, {rows} rows", {"triton": ours} | ({"ordinary": ordinary} if ordinary else {}))


def _leaves(report: Report) -> None:
    x, dy = (normal(8192, 1, 1, 4096, seed=s) for s in (26, 27))
    rstd, ranges = torch.rand(8192, device=DEVICE), [(i * 128, (i + 1) * 128) for i in range(64)]
    _measure(
        report, "gain leaves, 64 slices of 128", None, {"triton": lambda: pointwise.rmsnorm_gains(dy, x, rstd, ranges)}
    )
    ids, rows = torch.randint(0, 700, (1024,), device=DEVICE), dy[:1024, 0, 0]
    _measure(report, "embedding leaf, 1,024 tokens", None, {"triton": lambda: pointwise.embedding_leaf(rows, ids, 700)})


def _policy(report: Report, rows: int) -> None:
    flat, tokens = normal(rows, VOCAB, seed=28, scale=3), torch.arange(rows, device=DEVICE)
    peaked, coefficients = flat.clone(), torch.ones(rows, device=DEVICE)
    peaked[:, ::1500] += 15
    _measure(report, f"log_softmax, {rows} rows", lambda: flat.float().log_softmax(1).gather(1, tokens[:, None]),
             {"bf16_log_softmax": lambda: flat.log_softmax(1)})  # fmt: skip
    for name, setting in (("plain", (0.7, 1.0, -1)), ("top-p", (0.7, 0.95, -1)), ("both", (0.7, 0.95, 50))):
        params = RowParams.build([setting] * rows, VOCAB).to(DEVICE)
        variants: dict[str, Call] = {
            "score_flat": partial(policy.score_rows, flat, params, tokens),
            "score_peaked": partial(policy.score_rows, peaked, params, tokens),
            "sample_peaked": partial(policy.sample_rows, peaked, params, tokens, tokens, tokens),
            "backward_peaked": partial(policy.score_backward, peaked, params, tokens, coefficients),
        }
        _measure(report, f"policy, {rows} rows, {name}", None, variants)


def _state(report: Report) -> None:
    tensors = [torch.rand(100_000_000, device=DEVICE) for _ in range(4)]
    step = AdamStep.at(3, lr=1e-3, betas=(0.9, 0.98), eps=1e-8, decay=0.1, clip=0.7)
    _measure(report, "adamw, 1e8 elements", None, {"triton": lambda: state.adamw(*tensors, step)})
    x, words = tensors[0], tensors[0][: 10_000 * 8192].view(10_000, 8192).to(torch.bfloat16)
    ours = {"triton": lambda: state.sum_squares(x)}
    _measure(report, "sum of squares, 1e8 elements", lambda: x.double().square().sum().item(), ours)
    _measure(report, "fingerprint, 8e7 bf16 elements", None, {"triton": lambda: state.fingerprint(words)})
