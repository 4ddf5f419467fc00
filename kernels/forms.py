"""One function per op, one form per device: the form is chosen by where the tensors are, and nothing falls back.

Under TRITON_INTERPRET=1, Triton's own switch for running programs in Python, the CUDA forms take CPU tensors: so the
whole program can be run as a GPU would, without one.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

import torch

DEVICES = ("cpu", "cuda")


class NoKernelFormError(RuntimeError):
    """An op was asked for on a device that has no form of it."""


def form(op: str, tensor: torch.Tensor) -> Any:
    """The module that implements `op` where `tensor` is.

    Raises:
        NoKernelFormError: the device has none.
    """
    return _module(op, tensor.device.type)


@cache  # a decode step of the tiny model asks a hundred times
def _module(op: str, device: str) -> Any:
    if device not in DEVICES:
        raise NoKernelFormError(
            f"{op} has no form for device {device!r}; move the tensors to one of {', '.join(DEVICES)}"
        )
    folder = "cuda" if os.environ.get("TRITON_INTERPRET") == "1" else device
    return importlib.import_module(f"rlk.kernels.{folder}.{op}")
