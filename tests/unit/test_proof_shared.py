"""One proof a node: who asks for the same one is told, who asks for another proves; a failure is nobody's proof.

The proof itself is replaced by a count: what it does is tested elsewhere, and here only who runs it matters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlk.kernels import proof_shared
from rlk.kernels.proof import AttentionShape, Product, Proof, ProofError
from rlk.kernels.proof_shared import FOLDER, prove_once

CPU = torch.device("cpu")
PRODUCT = Product("qkv", 2, 48, 96, False, 3, True)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []

    def prove(device: torch.device, products: object, shape: object) -> tuple[Proof, ...]:
        seen.append(products)
        if not products:
            raise ProofError("kernel gemm: differs")
        return (Proof("gemm", "a form", f"proof {len(seen)}"),)

    monkeypatch.setattr(proof_shared, "prove", prove)
    return seen


def test_second_process_is_told_the_first_proof(
    runs: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "proofs"))
    first = prove_once(CPU, [PRODUCT], AttentionShape())
    assert prove_once(CPU, [PRODUCT], AttentionShape()) == first
    assert len(runs) == 1


def test_other_sizes_or_switches_are_proved_anew(
    runs: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    prove_once(CPU, [PRODUCT], AttentionShape())
    prove_once(CPU, [PRODUCT], AttentionShape(heads=8))
    prove_once(CPU, [PRODUCT, PRODUCT], AttentionShape())
    monkeypatch.setenv("RLK_GEMM", "triton")
    prove_once(CPU, [PRODUCT], AttentionShape())
    assert len(runs) == 4


def test_failure_stops_every_process(runs: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for _ in range(2):
        with pytest.raises(ProofError):
            prove_once(CPU, [], AttentionShape())
    assert len(runs) == 2


def test_without_a_folder_each_proves_for_itself(runs: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    for _ in range(2):
        prove_once(CPU, [PRODUCT], AttentionShape())
    assert len(runs) == 2
