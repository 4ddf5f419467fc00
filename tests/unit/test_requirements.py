"""The pins of the two devices are the same, but for exceptions that their file gives a reason for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "requirements"
PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;#]+)")
EXCEPTIONS = {"numpy", "protobuf"}


def pins(*names: str) -> dict[str, str]:
    """Version by normalised name; a name that is pinned twice fails."""
    found: dict[str, str] = {}
    for line in (line for name in names for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()):
        if line.strip() and not line.startswith("#"):
            match = PIN.match(line)
            assert match is not None, f"no pin: {line}"
            name = re.sub(r"[._-]+", "-", match[1]).lower()
            assert found.setdefault(name, match[2]) == match[2], f"{name} is pinned twice"
    return found


def test_cuda_brings_the_official_wheels() -> None:
    cuda = pins("cuda.txt")
    assert {name: cuda[name] for name in ("vllm", "torch", "triton", "ray")} == {
        "vllm": "0.26.0",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "ray": "2.60.0",
    }


def test_both_devices_have_the_same_pins() -> None:
    cpu, cuda = pins("cpu.txt", "ray-jobs.txt", "build-cpu.txt"), pins("cuda.txt")
    shared = cpu.keys() & cuda.keys()
    assert len(shared) > 60
    assert {name for name in shared if cpu[name] != cuda[name]} == EXCEPTIONS


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_exception_has_its_reason(name: str) -> None:
    assert re.search(rf"^#   {name} +\S+, which vLLM imports, wants <", (FOLDER / "cuda.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("names", [("cpu.txt", "ray-jobs.txt", "dev.txt", "build-cpu.txt"), ("cuda.txt", "dev.txt")])
def test_files_installed_together_agree(names: tuple[str, ...]) -> None:
    assert pins(*names)
