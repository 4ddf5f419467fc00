"""CPU form of the optimizer, norms and fingerprints: state.cpp."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from rlk.kernels.cpu.library import load, pointer
from rlk.kernels.state import AdamStep, Part, combine

F32 = torch.float32
VIEWS = {2: torch.int16, 4: torch.int32}


def describe() -> str:
    """Which implementation runs."""
    return "cpu: fixed loop order in C++"


def adamw(master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, s: AdamStep) -> None:
    """See rlk.kernels.state."""
    load().rlk_adamw(
        pointer(master, F32), pointer(m, F32), pointer(v, F32), pointer(grad, F32), s.clip, s.keep, s.beta1, s.rest1,
        s.beta2, s.rest2, s.step, s.correction, s.eps, master.numel(),
    )  # fmt: skip


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See rlk.kernels.state."""
    atoms = [atom for x in tensors for atom in x.view(math.prod(x.shape[:-1]), x.shape[-1])]
    found = [load().rlk_sum_squares(pointer(x, F32), x.numel()) for x in atoms]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def fingerprints(tensors: Sequence[Sequence[Part]]) -> list[tuple[int, int]]:
    """See rlk.kernels.state."""
    return [combine([_fingerprint(p.x, p.row0, p.col0, p.width) for p in parts]) for parts in tensors]


def _fingerprint(x: torch.Tensor, row0: int, col0: int, width: int) -> tuple[int, int]:
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise TypeError(
            f"a fingerprint takes rows of contiguous elements, got shape {tuple(x.shape)} strides {x.stride()}"
        )
    size = x.element_size()
    kernel = {2: load().rlk_fingerprint_16, 4: load().rlk_fingerprint_32}[size]
    out = (ctypes.c_uint64 * 2)()
    bits = x.view(VIEWS[size])
    kernel(
        pointer(bits, VIEWS[size], contiguous=False),
        *x.shape,
        x.stride(0),
        row0,
        col0,
        width,
        ctypes.addressof(out),
    )
    return out[0], out[1]


def row_fingerprints(x: torch.Tensor, shards: int, shard0: int) -> torch.Tensor:
    """See rlk.kernels.state."""
    rows, cols = x.shape[0], x.shape[1] // shards
    size = x.element_size()
    kernel = {2: load().rlk_row_fingerprints_16, 4: load().rlk_row_fingerprints_32}[size]
    out = torch.zeros(rows, shards, dtype=torch.int64)
    kernel(pointer(x.view(VIEWS[size]), VIEWS[size]), rows, shards, cols, shard0, pointer(out, torch.int64))
    return out
