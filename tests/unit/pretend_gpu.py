"""A GPU made of tags: tensors stay on the CPU, but those on "cuda" are marked and must not meet the others.

Without a GPU every tensor lies on the CPU, and one that was left on the wrong device would go unnoticed. Here a tensor
is marked when it is made or moved to "cuda", or computed from one that is; kernels compute with their CPU forms.
Like CUDA it lets a CPU scalar and a CPU index join; like CUDA it refuses `numpy`, and any other mixture.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from rlk.kernels import forms

cpu = forms._module

MARK = "pretended"
CUDA = torch.device("cuda", 0)
_COMES_HOME = {"cpu", "tolist", "item", "__float__", "__int__", "__bool__", "__index__", "__len__", "size", "dim"}
_INDEXES = {"__getitem__", "index_select", "__setitem__"}
_MAKES = {"empty", "zeros", "ones", "full", "arange", "tensor", "randn", "rand", "eye", "as_tensor"}


def on_gpu(t: torch.Tensor) -> bool:
    return getattr(t, MARK, False)


class DeviceMixError(AssertionError):
    """Tensors of two devices met."""


def _tensors(things: Any) -> Iterator[torch.Tensor]:
    if isinstance(things, torch.Tensor):
        yield things
    elif isinstance(things, list | tuple):
        for thing in things:
            yield from _tensors(thing)
    elif isinstance(things, dict):
        yield from _tensors(list(things.values()))


def _mark(things: Any) -> Any:
    for t in _tensors(things):
        setattr(t, MARK, True)
    return things


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class PretendGpu(TorchFunctionMode):
    """While it is entered, device "cuda" exists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        full = resolve_name(func) or name
        if full.endswith("device.__get__") or (name == "__get__" and full == "torch.Tensor.device"):
            return CUDA if on_gpu(args[0]) else func(*args)
        if full.endswith("is_cuda.__get__"):
            return on_gpu(args[0])
        if name == "to":
            return self._to(func, args, kwargs)
        if name in _MAKES or name.startswith("new_"):
            return self._make(func, name, args, kwargs)
        met = list(_tensors([args, kwargs]))
        there = any(map(on_gpu, met))
        if not there:
            return func(*args, **kwargs)
        if name in ("numpy", "__array__", "from_numpy"):
            raise DeviceMixError(f"{name} of a tensor on {CUDA}: bring it to the host first")
        self._refuse_mixture(name, args, met)
        out = func(*args, **kwargs)
        if name == "cpu":
            return out.clone() if out is args[0] else out
        return out if name in _COMES_HOME else _mark(out)

    def _refuse_mixture(self, name: str, args: Any, met: list[torch.Tensor]) -> None:
        if name == "copy_":
            return
        if name in _INDEXES and on_gpu(args[0]):
            met = [t for t in met if on_gpu(t) or t.dim() > 0] if name == "__setitem__" else [args[0]]
        foreign = [t for t in met if not on_gpu(t) and t.dim() > 0]
        if foreign:
            raise DeviceMixError(f"{name}: a CPU tensor of shape {tuple(foreign[0].shape)} meets tensors on {CUDA}")

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        source, *rest = args
        target = kwargs.get("device")
        places = [x for x in rest if isinstance(x, torch.device | str)]
        if any(isinstance(x, torch.Tensor) for x in rest):
            raise DeviceMixError("to(tensor) is not pretended: name the device")
        target = places[0] if places else target
        if target is None:
            return _mark(func(*args, **kwargs)) if on_gpu(source) else func(*args, **kwargs)
        rest = [torch.device("cpu") if isinstance(x, torch.device | str) else x for x in rest]
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        out = func(source, *rest, **kwargs)
        moved = _is_cuda(target) != on_gpu(source)
        if moved and out is source:
            out = source.clone()
            if hasattr(out, MARK):
                delattr(out, MARK)
        return _mark(out) if _is_cuda(target) else out

    def _make(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        there = _is_cuda(kwargs.get("device")) or (
            name.startswith("new_") and kwargs.get("device") is None and on_gpu(args[0])
        )
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        out = func(*args, **kwargs)
        return _mark(out) if there else out


class _Form:
    """The CPU form of an op, in the place of the CUDA form."""

    def __init__(self, op: str) -> None:
        self._inner = importlib.import_module(f"rlk.kernels.cpu.{op}")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            foreign = [t for t in _tensors([args, kwargs]) if not on_gpu(t)]
            if foreign:
                raise DeviceMixError(f"kernel {name}: a tensor of shape {tuple(foreign[0].shape)} is on the CPU")
            with torch._C.DisableTorchFunction():
                return _mark(function(*args, **kwargs))

        return called


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Device "cuda" exists, and its kernels compute with the CPU forms."""

    def module(op: str, device: str) -> Any:
        return _Form(op) if device == "cuda" else cpu(op, device)

    quiet = {name: lambda *_: 0 for name in ("memory_allocated", "synchronize", "empty_cache")}
    with patch.object(forms, "_module", module), patch.multiple(torch.cuda, **quiet), PretendGpu():
        yield
