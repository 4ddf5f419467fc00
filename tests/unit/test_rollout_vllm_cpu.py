"""The stand-ins for vLLM's missing CPU ops, against loops over the definition; and the platform that brings them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlk.rollout.vllm_platform import platform
from tests.unit.vllm_modules import with_vllm


@pytest.fixture(scope="module")
def cpu() -> Any:
    return with_vllm("vllm_cpu")


def test_slots_follow_pages_and_positions(cpu: Any) -> None:
    """A decode row, a chunk that crosses a page, an empty request and a whole prompt; pages of 4 in random order."""
    first = torch.tensor([0, 1, 7, 7, 10], dtype=torch.int32)
    positions = torch.tensor([9, 2, 3, 4, 5, 6, 7, 0, 1, 2, 99, 99])
    table = torch.tensor([[5, 1, 8], [2, 7, 0], [0, 0, 0], [3, 0, 0]], dtype=torch.int32)
    slots = torch.full((12,), -1)
    cpu.slot_mapping(first, positions, table, slots, 4)
    expected = []
    for request in range(4):
        for token in range(int(first[request]), int(first[request + 1])):
            page, row = divmod(int(positions[token]), 4)
            expected.append(int(table[request, page]) * 4 + row)
    assert slots.tolist() == [*expected, -1, -1]


def test_ops_exist_after_loading_kernels(cpu: Any) -> None:
    cpu.CpuPlatform.import_kernels()
    slots = torch.zeros(1, dtype=torch.int64)
    first, table = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[6]], dtype=torch.int32)
    torch.ops._C.compute_slot_mapping_kernel_impl(first, torch.tensor([3]), table, slots, 16)
    torch.ops._C.init_cpu_memory_env([0])
    assert slots.tolist() == [6 * 16 + 3]


def test_loading_kernels_twice_defines_once(cpu: Any) -> None:
    assert cpu.define_missing_ops() is cpu.define_missing_ops()


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("cpu", "rlk.rollout.vllm_cpu.CpuPlatform"),
        ("cuda", "rlk.rollout.vllm_cuda.SharedCudaPlatform"),
        ("1", None),
        ("", None),
        (None, None),
    ],
)
def test_platform_is_ours_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, value: str | None, chosen: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("RLK_PLATFORM", raising=False)
    else:
        monkeypatch.setenv("RLK_PLATFORM", value)
    assert platform() == chosen
