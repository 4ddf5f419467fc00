"""The committed evidence of real GPUs: what ran there passed, with the events that make it worth something.

Files of one schema, made by `python -m tools.gather` of sealed run directories, each validated once more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk.evidence.matrix import CellRecord, MatrixEvidence
from rlk.evidence.matrix_detail import CellDetail
from rlk.plan.cells import load_cells

ROOT = Path(__file__).parents[2]
FILES = ("gpu-1", "gpu-1-long", "gpu-1-triton", "gpu-2", "gpu-2-ranks-2", "gpu-2-triton", "gpu-2-8b")


def read(name: str) -> MatrixEvidence:
    file = ROOT / "docs" / "evidence" / f"{name}.json"
    return MatrixEvidence.from_json(file.read_text(encoding="utf-8"), str(file))


def detail(one: CellRecord) -> CellDetail:
    assert one.detail is not None
    return one.detail


@pytest.mark.parametrize("name", FILES)
def test_every_run_passed_and_moved_the_weights(name: str) -> None:
    evidence = read(name)
    assert evidence.cells
    for one in evidence.cells:
        assert (one.passed, one.mismatches, one.errors) == (True, 0, ())
        assert one.revision
        assert "+" not in one.revision, "a checkout with changes"
        assert one.tokens == sum(step.response_tokens for step in detail(one).steps) > 0
        assert all(step.grad_norm > 0 and step.nonzero_advantages > 0 for step in detail(one).steps)
        assert detail(one).tensors_changed > 0
        assert detail(one).transport == "cuda-ipc"
        assert all(kernel.form.startswith("cuda") for kernel in detail(one).kernels)


@pytest.mark.parametrize(("name", "gpus"), [("gpu-1", 1), ("gpu-2", 2)])
def test_every_gpu_cell_ran_on_one_and_on_two_gpus(name: str, gpus: int) -> None:
    evidence = read(name)
    assert [one.id for one in evidence.cells] == [cell.id for cell in load_cells(ROOT / "matrices" / "gpu.yaml")]
    for one in evidence.cells:
        assert len({rank.gpu for rank in detail(one).train}) == gpus
        assert len({gpu for ranks in detail(one).engines for gpu in ranks}) == gpus
        assert detail(one).derived.offload == (one.train_tp == one.rollout_tp == 1)
        assert all((rank.freed_bytes > 0) == detail(one).derived.offload for rank in detail(one).train)
        events = [event for step in detail(one).steps for event in step.events]
        graphs = sum(event.graph_replays for event in events)
        assert (graphs > 0) == bool(detail(one).derived.graph_sizes) == (one.rollout_cp == 1)


def runs_of(*names: str) -> list[CellRecord]:
    return [one for name in names for one in read(name).cells]


def attention(one: CellRecord) -> str:
    (form,) = (kernel.form for kernel in detail(one).kernels if kernel.name == "attention")
    return form.removeprefix("cuda: ").split()[0].rstrip(",")


@pytest.mark.parametrize(
    ("names", "count", "library"),
    [
        (("gpu-1", "gpu-2", "gpu-2-ranks-2"), 15, "FlashAttention-3"),
        (("gpu-1-triton", "gpu-2-triton"), 13, "Triton"),
    ],
)
def test_one_trajectory_whatever_the_topology_ranks_and_gpus(names: tuple[str, ...], count: int, library: str) -> None:
    runs = runs_of(*names)
    assert len(runs) == count
    assert {attention(one) for one in runs} == {library}
    assert len({one.digest for one in runs}) == 1


def test_another_attention_model_or_length_makes_another_trajectory() -> None:
    """The twin."""
    one_each = [read(name).cells[0].digest for name in ("gpu-1", "gpu-1-triton", "gpu-1-long", "gpu-2-8b")]
    assert len(set(one_each)) == 4


def test_requests_were_thrown_out_in_the_pressed_cell_alone() -> None:
    for one in runs_of("gpu-1", "gpu-1-triton", "gpu-2", "gpu-2-triton"):
        thrown = sum(event.preemptions for step in detail(one).steps for event in step.events)
        assert (thrown > 0) == one.id.endswith("-pressed")
    assert [one.id.endswith("-pressed") for one in runs_of("gpu-1", "gpu-2", "gpu-1-triton")].count(True) == 3


def test_chunks_and_cached_tokens_occurred() -> None:
    for name in ("gpu-1", "gpu-2"):
        events = [event for one in read(name).cells for step in detail(one).steps for event in step.events]
        assert sum(event.chunks for event in events) > 0
        assert sum(event.cached_tokens for event in events) > 0


def test_ordinary_operators_mismatch_on_the_same_gpus() -> None:
    (one,) = read("gpu-2-ranks-2").cells
    assert one.native is not None
    assert one.native.mismatches > 0
    assert (one.train_tp, one.train_cp, one.rollout_tp) == (2, 1, 2)
    assert len({rank.gpu for rank in detail(one).train}) == 2


def test_responses_of_6912_tokens_were_generated_and_trained_on() -> None:
    (one,) = read("gpu-1-long").cells
    (step,) = detail(one).steps
    assert [event.tokens for event in step.events if event.samples] == [6912] * 6
    assert one.tokens == 6 * 6912


def test_the_8b_shape_ran_with_a_rank_a_gpu() -> None:
    (one,) = read("gpu-2-8b").cells
    weights = next(h.bytes for h in detail(one).train[0].holdings if h.name == "weights")
    assert weights * one.train_tp > 16e9, "bytes of 8.2 billion bf16 parameters"
    assert len({rank.gpu for rank in detail(one).train}) == 2
