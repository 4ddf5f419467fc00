"""vLLM 0.26.0 on a CPU without its compiled extension: the platform, and the two ops that its runner cannot do without.

The official source distribution builds with VLLM_TARGET_DEVICE=empty, which leaves `torch.ops._C` without the CPU ops.
Our model, attention and sampler need none of them; the worker's start and the block table need these two. Nothing is
replaced: where a build brings an op of this name, that one stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform as StockCpuPlatform


class CpuPlatform(StockCpuPlatform):  # type: ignore[misc]
    """vLLM's own CPU platform, completed by the missing ops when it loads its kernels."""

    @classmethod
    def import_kernels(cls) -> None:
        """Called by vLLM before the first use of a compiled op. Without an extension the parent only logs warnings."""
        if any(find_spec(f"vllm.{name}") for name in ("_C", "_C_AVX2", "_C_AVX512")):
            super().import_kernels()
        define_missing_ops()


def bind_memory(nodes: list[int]) -> None:
    """Stands in for init_cpu_memory_env: binds to no NUMA node, since ranks share the cores of one small machine."""


def slot_mapping(
    query_first: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, block_size: int
) -> None:
    """Writes the KV slot of every token to `slots`: page of its position, times the page size, plus the rest.

    query_first int32 [requests + 1], positions int64 [tokens], block_table int32 [requests, pages], slots int64 [>=
    tokens].
    """
    counts = (query_first[1:] - query_first[:-1]).to(torch.int64)
    tokens = int(query_first[-1])
    request = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    position = positions[:tokens].to(torch.int64)
    page = block_table[request, position // block_size].to(torch.int64)
    slots[:tokens] = page * block_size + position % block_size


@cache
def define_missing_ops() -> Any:
    """Defines what this build lacks; returns the library object, which must live as long as the ops."""
    library: Any = torch.library.Library("_C", "FRAGMENT")
    for schema, function in _OPS.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
    return library


_OPS: dict[str, Callable[..., None]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": bind_memory,
    "compute_slot_mapping_kernel_impl(Tensor query_first, Tensor positions, Tensor block_table, Tensor(a!) slots, "
    "int block_size) -> ()": slot_mapping,
}
