"""Loads the C++ kernels and hands tensors to them, refusing what they could misread."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from rlk.kernels import build

F32, F64, I64 = ctypes.c_float, ctypes.c_double, ctypes.c_int64
POINTER = ctypes.c_void_p

# One row a kernel: result type, then argument types as letters (p pointer, i int64, f float, d double).
SIGNATURES = {
    "rlk_gemm": (None, "piipipiiiii"),
    "rlk_gemm_ranges": (None, "piipippiii"),
    "rlk_round_bf16": (None, "ppi"),
    "rlk_rmsnorm": (None, "ppppfii"),
    "rlk_rmsnorm_backward": (None, "ppppppii"),
    "rlk_rmsnorm_gain": (None, "ppppii"),
    "rlk_rmsnorm_gains": (None, "pppppiiii"),
    "rlk_add": (None, "pppi"),
    "rlk_rope": (None, "pppppfiii"),
    "rlk_swiglu": (None, "ppii"),
    "rlk_swiglu_backward": (None, "pppii"),
    "rlk_embedding_leaf": (None, "pppiii"),
    "rlk_attention": (None, "pppppppppfiiiii"),
    "rlk_attention_backward": (None, "pppppppp" + "ppp" + "ffiiiiii"),
    "rlk_sample": (I64, "piippppppppp"),
    "rlk_score": (I64, "piippppppp"),
    "rlk_score_backward": (I64, "piipppppp"),
    "rlk_adamw": (None, "ppppfffffffffi"),
    "rlk_sum_squares": (F64, "pi"),
    "rlk_fingerprint_16": (None, "piiiiiip"),
    "rlk_fingerprint_32": (None, "piiiiiip"),
    "rlk_row_fingerprints_16": (None, "piiiip"),
    "rlk_row_fingerprints_32": (None, "piiiip"),
    "rlk_arena_header": (I64, ""),
    "rlk_arena_join": (None, "pi"),
    "rlk_exchange": (I64, "piippiiid"),
}
LETTERS = {"p": POINTER, "i": I64, "f": F32, "d": F64}


@cache
def load() -> ctypes.CDLL:
    """The library, built if this machine has none yet.

    Raises:
        rlk.kernels.build.BuildError: it cannot be built.
    """
    library = ctypes.CDLL(str(build.library()))
    for name, (result, letters) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = [LETTERS[letter] for letter in letters]
    return library


def pointer(t: torch.Tensor, dtype: torch.dtype, *, contiguous: bool = True) -> int:
    """Address of the first element.

    Raises:
        TypeError: the dtype, the device or the layout is not what the kernel reads.
    """
    if t.dtype != dtype or t.device.type != "cpu" or (contiguous and not t.is_contiguous()):
        raise TypeError(
            f"a CPU kernel takes {'contiguous ' if contiguous else ''}{dtype} on cpu, got {t.dtype} on {t.device} "
            f"with shape {tuple(t.shape)} and strides {t.stride()}"
        )
    return t.data_ptr()


def token_ranges(ranges: Sequence[Any], tokens: int) -> torch.Tensor:
    """Ranges [first, end) of tokens as a kernel reads them, int64 [..., 2].

    Raises:
        ValueError: one does not lie within the tokens that there are.
    """
    out = torch.tensor(ranges, dtype=torch.int64)
    if bool((out < 0).any() or (out > tokens).any() or (out[..., 0] > out[..., 1]).any()):
        raise ValueError(f"ranges {ranges}: allowed are first <= end within 0 to {tokens} tokens")
    return out
