"""Random data, shapes and small helpers that the steps share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from rlk.kernels.cuda import choice
from rlk.kernels.product_proof import Product

DEVICE = torch.device("cuda")
ATTENTIONS = ("fa3", "triton") if find_spec("vllm") else ("triton",)
"""Names of RLK_ATTENTION that can be tried here: FlashAttention-3 comes with vLLM."""
VOCAB, PADDED_VOCAB = 151_936, 152_576


@dataclass(frozen=True)
class Model:
    """What of a Qwen3 the kernels see."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    def products(self, tp: int, rows: int, *, backward: bool) -> list[Product]:
        """The weights of one rank of `tp`."""
        s, qkv = 8 // tp, (self.heads + 2 * self.kv_heads) * self.head_dim // 8
        sizes = [
            ("qkv", qkv, self.hidden, False, rows),
            ("o", self.hidden, self.heads * self.head_dim // 8, True, rows),
            ("gate_up", self.mlp // 4, self.hidden, False, rows),
            ("down", self.hidden, self.mlp // 8, True, rows),
            ("head", PADDED_VOCAB // 8, self.hidden, False, min(rows, 512)),
        ]
        return [Product(f"{self.name} tp{tp} {n}", s, a, b, row, m, backward) for n, a, b, row, m in sizes]


BIG = Model("qwen3-8b", 4096, 32, 8, 128, 12288)
SMALL = Model("qwen3-0.6b", 1024, 16, 8, 128, 3072)


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """bf16 values as activations and weights have them."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(torch.bfloat16)


def spread(*shape: int, seed: int) -> torch.Tensor:
    """Values of widely different size, so that the order of a sum shows in its bits."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sizes = torch.randn(shape, generator=generator, device=DEVICE).exp()
    return (torch.randn(shape, generator=generator, device=DEVICE) * sizes).to(torch.bfloat16)


def integers(t: torch.Tensor) -> torch.Tensor:
    """The integer view, so that -0 is not 0 and a NaN equals itself."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def moved(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements that differ in any byte."""
    return int((integers(a) != integers(b)).sum())


def equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raises AssertionError with the count unless every byte is equal."""
    count = moved(found, expected)
    if count:
        raise AssertionError(f"{what}: {count} of {found.numel()} elements differ")


def rms(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean square of found - exact (float64)."""
    return float((found.double() - exact).square().mean().sqrt())


@contextmanager
def chosen(**names: str) -> Iterator[None]:
    """Runs with other kernel choices: RLK_GEMM="triton"."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    choice.chosen.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        choice.chosen.cache_clear()
