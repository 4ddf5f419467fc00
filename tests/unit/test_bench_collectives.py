"""The benchmark of collectives: both libraries' calls give what they should, and a wrong sum shows in its error."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk.kernels.collectives.gloo import GlooCollective
from rlk.kernels.tree import tree_sum
from tests.bench.collectives import contribution, everything, exact, nccl, ours, relative_error, speeds

CPU = torch.device("cpu")
SIZES = (("small", 1 << 10), ("large", 1 << 14))


class SummingGloo(GlooCollective):
    """The movements of gloo with the sums of a transport that adds on the way."""

    def gather_tree(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        return tree_sum(self.all_gather(t, stage))

    def exchange_tree(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        return tree_sum(self.all_to_all(t, stage))


def process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    c = SummingGloo(group, "bench")
    ops = [*ours(c), *nccl(group, 2, rank)]
    calls = []

    def timer(call: Any) -> dict[str, float]:
        calls.append(bool(call().isfinite().all()))
        return {"eager_us": 2.0, "graph_us": 1.0}

    entries = everything(ops, c, CPU, timer, Path(folder, f"{rank}.json"), SIZES)
    assert all(calls)
    Path(folder, f"{rank}.returned").write_text(json.dumps(entries) + "\n")
    dist.barrier()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("bench")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=process, args=(rank, str(folder)), daemon=True) for rank in (0, 1)]
    for started in processes:
        started.start()
    for started in processes:
        started.join(120)
    assert [ended.exitcode for ended in processes] == [0, 0]
    for rank in (0, 1):
        assert (folder / f"{rank}.json").read_text() == (folder / f"{rank}.returned").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_gives_its_collective(found: list[list[dict[str, Any]]], rank: int) -> None:
    entries = found[rank]
    assert len(entries) == 2 * (4 + 6)
    for e in entries:
        most = 0 if e["op"] == "all-gather" else {"float32": 1e-7, "bfloat16": 1e-2}[e["dtype"]]
        assert e["rms_error"] <= most, e
        assert e["op"] == "all-gather" or e["rms_error"] > 0, e
    assert all(e["equals_tree"] for e in entries if "equals_tree" in e)
    assert sum("equals_tree" in e for e in entries) == 2


def test_a_sum_that_lost_a_rank_has_a_large_error() -> None:
    class Two:
        rank, size = 0, 2

    whole = exact("all-reduce", 4096, Two(), torch.float32, CPU)
    assert relative_error(whole.float(), whole) < 1e-7
    assert relative_error(contribution(4096, 0, CPU), whole) > 0.1


def test_speeds_are_beside_the_same_call_and_sums_also_beside_bf16(found: list[list[dict[str, Any]]]) -> None:
    table = speeds(found[0])
    assert table["all-reduce large: float32 against float32"] == {"eager": 1.0, "graph": 1.0}
    assert "reduce-scatter small: float32 against bfloat16" in table
    assert "all-gather small: bfloat16 against bfloat16" in table
    assert "all-gather small: bfloat16 against float32" not in table
    assert speeds([e for e in found[0] if e["who"] == "rlk"]) == {}
