"""One function per op, one form per device: the form is chosen by where the tensors are, and nothing falls back."""

from __future__ import annotations

import importlib
import importlib.util
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
    name = f"rlk.kernels.{device}.{op}"
    if device not in DEVICES or importlib.util.find_spec(f"rlk.kernels.{device}") is None:
        raise NoKernelFormError(
            f"{op} has no form for device {device!r}; move the tensors to one of {', '.join(DEVICES)}"
        )
    return importlib.import_module(name)
