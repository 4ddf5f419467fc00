"""Matrix products of Qwen3-8B beside cuBLAS as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlk.kernels import gemm
from tests.bench.case import Case
from tools.gpu.data import normal

CUBLAS = "torch.mm, cuBLAS as it comes"
GEMMS = {c: {"RLK_GEMM": c} for c in ("cublas", "cublas-fp32", "triton")}
TREES = {c: {"RLK_TREE": c} for c in ("cublas", "triton")}
Slices = list[list[tuple[int, int]]]


def cases() -> Iterator[Case]:
    """Forward for decode and training sizes, gradients for training sizes."""
    for m in (16, 64, 2048, 8192):
        for name, n in (("qkv", 6144), ("gate_up", 24576)):
            yield _column(m, name, n)
    for m in (16, 64, 2048):
        for name, k in (("o", 512), ("down", 1536)):
            yield _row(m, name, k)
    for name, n in (("qkv", 768), ("gate_up", 3072)):
        yield _column_input(2048, name, n)
    yield _row_input(2048)
    for samples, length in ((4, 1024), (16, 256)):
        yield _weight_gradient(samples, length)


def _column(m: int, name: str, n: int) -> Case:
    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return gemm.linear(x, gemm.prepare(w))

    return Case(
        f"column product, {name}", f"M {m}", lambda: (normal(m, 4096, seed=1), normal(n, 4096, seed=2, scale=1 / 64)),
        dict.fromkeys(GEMMS, ours), (CUBLAS, lambda x, w: torch.mm(x, w.t())),
        lambda x, w: x.double() @ w.double().t(), GEMMS,
    )  # fmt: skip


def _flat(w: torch.Tensor) -> torch.Tensor:
    """[8, N, K] to [N, 8 K]: the weight as an ordinary engine stores it."""
    return w.transpose(0, 1).reshape(w.shape[1], -1)


def _row(m: int, name: str, k: int) -> Case:
    def make() -> tuple[Any, ...]:
        w = normal(8, 4096, k, seed=4, scale=1 / 64)
        return normal(m, 8, k, seed=3), w, _flat(w)

    return Case(
        f"row product, {name}", f"M {m}", make,
        dict.fromkeys(TREES, lambda x, w, _: gemm.row_linear(x, gemm.prepare(w))),
        (CUBLAS, lambda x, _, whole: torch.mm(x.flatten(1), whole.t())),
        lambda x, _, whole: x.flatten(1).double() @ whole.double().t(), TREES,
    )  # fmt: skip


def _column_input(m: int, name: str, n: int) -> Case:
    return Case(
        f"input gradient, {name}", f"M {m}",
        lambda: (normal(m, 8, n, seed=5), normal(8, n, 4096, seed=6, scale=1 / 64)),
        dict.fromkeys(TREES, lambda dy, w: gemm.round_bf16(gemm.column_input_leaves(dy, w))),
        (CUBLAS, lambda dy, w: torch.mm(dy.flatten(1), w.flatten(0, 1))),
        lambda dy, w: dy.flatten(1).double() @ w.flatten(0, 1).double(), TREES,
    )  # fmt: skip


def _row_input(m: int) -> Case:
    def make() -> tuple[Any, ...]:
        w = normal(8, 4096, 1536, seed=8, scale=1 / 64)
        return normal(m, 4096, seed=7), w, _flat(w)

    return Case(
        "input gradient, down", f"M {m}", make,
        dict.fromkeys(GEMMS, lambda dy, w, _: gemm.row_inputs(dy, w).flatten(1)),
        (CUBLAS, lambda dy, _, whole: torch.mm(dy, whole)), lambda dy, _, whole: dy.double() @ whole.double(), GEMMS,
    )  # fmt: skip


def _weight_gradient(samples: int, length: int) -> Case:
    cut = length // 8
    slices: Slices = [[(s * length + i * cut, s * length + (i + 1) * cut) for i in range(8)] for s in range(samples)]
    t = samples * length
    return Case(
        "weight gradient, qkv: fp32 a sample, against one bf16 product over all", f"{samples} samples of {length}",
        lambda: (normal(t, 6144, seed=9), normal(t, 4096, seed=10)),
        {"triton": lambda dy, x: gemm.weight_gradients(dy, x, slices)},
        (CUBLAS, lambda dy, x: torch.mm(dy.t(), x)),
    )  # fmt: skip
