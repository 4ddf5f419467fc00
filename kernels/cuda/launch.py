"""How every Triton program is started, and what is refused before one could misread a tensor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import triton

from rlk.kernels.cuda import interpreter

Count = TypeVar("Count", int, npt.NDArray[np.int64])

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""TRITON_INTERPRET=1 was set when Triton was imported: programs run in Python, on CPU tensors."""

DEVICE = "cpu" if INTERPRETED else "cuda"

PLACE = "cuda, interpreted" if INTERPRETED else "cuda"
"""How the forms begin when they say which implementation runs."""

ALONE = threading.Lock() if INTERPRETED else nullcontext()
"""The interpreter changes Triton's own modules for the time of a launch: ranks that are threads take turns."""

if INTERPRETED:
    interpreter.repair()


def run(
    kernel: Any, grid: tuple[int, ...], *args: object, warps: int = 4, stages: int = 3, **constants: object
) -> None:
    """Starts `kernel` over `grid`; nothing to do is nothing started.

    enable_fp_fusion is off for every program: a multiply-add that the compiler chooses to fuse rounds once where the
    program says twice. There is no autotuning: a timed choice could differ between two processes.
    """
    if 0 not in grid:
        with ALONE:
            kernel[grid](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def ranges(pairs: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Places of rows, such as nested pairs, as int64 on a device. Kept for a while: all layers of a micro-batch ask for
    the same."""
    return _ranges(_tuples(pairs), device)


@lru_cache(maxsize=32)
def _ranges(pairs: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64).to(device)


def _tuples(pairs: Any) -> Any:
    """Lists as tuples, all the way down; what is made of tuples is taken as it is."""
    try:
        hash(pairs)
    except TypeError:
        return tuple(map(_tuples, pairs))
    return pairs


def take(t: torch.Tensor, dtype: torch.dtype, *, contiguous: bool = True) -> torch.Tensor:
    """The tensor itself.

    Raises:
        TypeError: the dtype, the device or the layout is not what the program reads.
    """
    if t.dtype != dtype or t.device.type != DEVICE or (contiguous and not t.is_contiguous()):
        kind, layout = "an interpreted" if INTERPRETED else "a CUDA", "contiguous " if contiguous else ""
        raise TypeError(
            f"{kind} kernel takes {layout}{dtype} on {DEVICE}, got {t.dtype} on {t.device} with shape {tuple(t.shape)} "
            f"and strides {t.stride()}"
        )
    return t


def tiles(n: Count, size: int) -> Count:
    """Tiles of `size` that cover n, or each number of an array."""
    return -(-n // size)


def power(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
