"""From and to Hugging Face checkpoints, one virtual shard at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlk.kernels import state
from rlk.model.layout import Param, Region, Tensor
from rlk.model.parallel import ParallelContext

HOST = torch.device("cpu")


class CheckpointError(RuntimeError):
    """A checkpoint lacks a tensor, or holds one of another shape or dtype."""


def as_shards(stored: torch.Tensor) -> torch.Tensor:
    """A stored parameter as [S, rows, cols]: a replicated vector becomes one shard of one row."""
    return stored[None, None] if stored.dim() == 1 else stored


def region_view(shard: torch.Tensor, region: Region) -> torch.Tensor:
    """The part of a stored shard [rows, cols] that a region describes."""
    return shard[region.start : region.start + region.rows]


def held_shards(param: Param, context: ParallelContext) -> Iterable[int]:
    """Indices of the virtual shards of `param` held here."""
    return (0,) if param.replicated else context.shards


def empty_stored(param: Param, context: ParallelContext, device: torch.device = HOST) -> torch.Tensor:
    """bf16 zeros in the stored shape."""
    shape = param.shard_shape
    whole = shape if param.replicated else (len(context.shards), *shape)
    return torch.zeros(whole, dtype=torch.bfloat16, device=device)


def load(path: Path, params: Iterable[Param], context: ParallelContext) -> dict[str, torch.Tensor]:
    """The rank's shards of a safetensors checkpoint folder, bf16 on the host, as `Qwen3.load` takes them.

    Raises:
        CheckpointError: a tensor is missing, or not bf16 of the shape that config.json implies.
    """
    files, out = _files(path), {}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in set(files.values())}
        for param in params:
            stored = empty_stored(param, context)
            for held, index in zip(as_shards(stored), held_shards(param, context), strict=True):
                for tensor, region in zip(param.tensors, param.regions(index), strict=True):
                    if tensor.hf_name not in files:
                        raise CheckpointError(f"{path}: no tensor {tensor.hf_name}; the model needs it")
                    file = files[tensor.hf_name]
                    region_view(held, region).copy_(_read(opened[file], file, tensor, region))
            out[param.name] = stored
    return out


def _files(path: Path) -> dict[str, Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = path / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{path}: neither model.safetensors nor an index of shards is there")
    with safe_open(single, "pt") as f:
        return dict.fromkeys(f.keys(), single)


def _read(opened: Any, file: Path, tensor: Tensor, region: Region) -> torch.Tensor:
    view, name, shape = opened.get_slice(tensor.hf_name), tensor.hf_name, tensor.shape
    if tuple(view.get_shape()) != shape or view.get_dtype() != "BF16":
        found = f"{view.get_dtype()} {tuple(view.get_shape())}"
        raise CheckpointError(f"{file}: {name} is {found}; allowed is BF16 {shape}")
    rows, cols = slice(region.row0, region.row0 + region.rows), slice(region.col0, region.col0 + region.cols)
    part: torch.Tensor = view[cols] if len(shape) == 1 else view[rows, cols]
    return part


def exported(
    params: Iterable[Param], stored: Mapping[str, torch.Tensor], context: ParallelContext
) -> Iterator[tuple[Tensor, Region, torch.Tensor]]:
    """The parts of exported tensors that this rank holds: what each belongs to, its place in it, and the live view."""
    for param in params:
        for held, index in zip(as_shards(stored[param.name]), held_shards(param, context), strict=True):
            for tensor, region in zip(param.tensors, param.regions(index), strict=True):
                if region.rows:
                    yield tensor, region, region_view(held, region)


def fingerprints(
    params: Iterable[Param], stored: Mapping[str, torch.Tensor], context: ParallelContext
) -> dict[str, tuple[int, int]]:
    """This rank's part of the fingerprint of every exported tensor, by checkpoint name: parts of the ranks add up.

    A replicated tensor is whole on every rank: count it once. A rank with only padding of a vocabulary says (0, 0).
    """
    parts: dict[str, list[state.Part]] = {t.hf_name: [] for param in params for t in param.tensors}
    for tensor, r, part in exported(params, stored, context):
        parts[tensor.hf_name].append(state.Part(part, r.row0, r.col0, tensor.width))
    return dict(zip(parts, state.fingerprints(list(parts.values())), strict=True))


def described(
    params: Iterable[Param], stored: Mapping[str, torch.Tensor], context: ParallelContext
) -> list[tuple[str, int, str]]:
    """Checkpoint name, elements held here and dtype of every exported part, from the live views."""
    return [
        (tensor.hf_name, part.numel(), str(part.dtype).removeprefix("torch."))
        for tensor, _, part in exported(params, stored, context)
    ]
