"""Attention with Qwen3-8B's heads beside scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from rlk.kernels import attention
from rlk.kernels.cuda import choice
from tests.bench.case import Case
from tools.gpu.data import ATTENTIONS, DEVICE, chosen, normal

SDPA = "scaled_dot_product_attention"
CHOICES = {name: {"RLK_ATTENTION": name} for name in ATTENTIONS}


def cases() -> Iterator[Case]:
    """Prefill, backward, decode from pages."""
    for n in (2048, 8192):
        yield _prefill(n)
        yield _backward(n)
    for rows, length in ((32, 4096), (64, 1024), (8, 16384)):
        yield _decode(rows, length)


def _heads(n: int, *seeds: int) -> tuple[torch.Tensor, ...]:
    return tuple(normal(n, h, 128, seed=s) for s, h in zip(seeds, (32, 8, 8, 32), strict=False))


def _dense(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[T, H, D] to [1, H, T, D], contiguous."""
    return t.transpose(0, 1)[None].to(dtype or t.dtype, memory_format=torch.contiguous_format)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _prefill(n: int) -> Case:
    segments: dict[str, Any] = {}
    ends, positions = torch.tensor([0, n], device=DEVICE), torch.arange(n, device=DEVICE)

    def make() -> tuple[Any, ...]:
        rows = _heads(n, 11, 12, 13)
        return *rows, *(_dense(t) for t in rows)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        name = choice.chosen("RLK_ATTENTION")
        if name not in segments:  # a trainer finds them once a micro-batch
            segments[name] = attention.segments(positions, ends, ends)
        return _dense(attention.packed(q, k, v, positions, ends, ends, segments[name])[0])

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.cat([_exact_head(q, k, v, h) for h in range(32)], 1)

    return Case(
        "attention, prefill", f"{n} tokens", make, dict.fromkeys(CHOICES, ours), (SDPA, lambda *r: _sdpa(*r[3:])),
        exact if n <= 2048 else None, CHOICES,
    )  # fmt: skip


def _exact_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int) -> torch.Tensor:
    """[1, 1, T, D] float64: one head at a time, since its scores fill memory."""
    one = (q[:, head], k[:, head // 4], v[:, head // 4])
    return functional.scaled_dot_product_attention(*(t.double()[None, None] for t in one), is_causal=True)


def _backward(n: int) -> Case:
    ends, positions = torch.tensor([0, n], device=DEVICE), torch.arange(n, device=DEVICE)
    slices = [[(i * n // 8, (i + 1) * n // 8) for i in range(8)]]

    def make() -> tuple[Any, ...]:
        q, k, v, dout = _heads(n, 16, 17, 18, 19)
        with chosen(RLK_ATTENTION="triton"):
            out, lse = attention.packed(q, k, v, positions, ends, ends)
        leaves = [_dense(t).requires_grad_() for t in (q, k, v)]
        return (dout, q, k, v, out, lse), (_sdpa(*leaves), leaves, _dense(dout))

    return Case(
        "attention, backward", f"{n} tokens", make,
        {"triton": lambda rows, _: attention.packed_gradients(*rows, positions, ends, (0, n), slices)},
        (SDPA, lambda _, g: torch.autograd.grad(*g, retain_graph=True)),
    )  # fmt: skip


def _decode(rows: int, length: int) -> Case:
    pages = length // 16
    first = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)

    def make() -> tuple[Any, ...]:
        generator = torch.Generator(DEVICE).manual_seed(14)
        table = torch.randperm(rows * pages, generator=generator, device=DEVICE).view(rows, pages)
        cache, q = normal(rows * pages, 8, 16, 256, seed=14), normal(rows, 32, 128, seed=15)
        dense = cache[table].transpose(1, 2).reshape(rows, 8, length, 256)
        return q, cache, table.to(torch.int32), *(t.contiguous() for t in dense.chunk(2, -1))

    def ordinary(q: torch.Tensor, _: Any, __: Any, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    def exact(q: torch.Tensor, _: Any, __: Any, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        one = [
            functional.scaled_dot_product_attention(
                q[i, h, None].double(), k[i, h // 4].double(), v[i, h // 4].double()
            )
            for i in range(rows)
            for h in range(32)
        ]
        return torch.cat(one).view(rows, 32, 128)  # fmt: skip

    return Case(
        "attention, decode", f"{rows} of {length} tokens", make,
        dict.fromkeys(CHOICES, lambda q, cache, table, *_: attention.paged(q, cache, table, first, lengths)),
        (f"{SDPA}, keys not in pages", ordinary),
        exact if rows == 8 else None,
        CHOICES,
    )  # fmt: skip
