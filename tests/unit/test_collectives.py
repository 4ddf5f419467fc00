"""A reduction's order is the tree's, whichever transport and however many ranks hold the leaves.

Two partials cannot fail, since a + b = b + a: every case has eight leaves, and a probe that another order would move.
The transports are threads (what the other tests stand on), gloo with two processes, and shared memory with these two
and with threads, which are as many as ranks can be.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk.kernels.collectives import mapping, shared_memory
from rlk.kernels.collectives.base import Alone, Collective, CollectiveTimeoutError, tree_all_reduce, tree_reduce_scatter
from rlk.kernels.collectives.gloo import GlooCollective
from rlk.kernels.collectives.shared_memory import SharedMemoryCollective
from rlk.kernels.tree import tree_sum
from rlk.model.ops import CanonicalOps
from rlk.model.parallel import ParallelContext
from tests.unit.probes import Record, assert_as_accurate, assert_moved, assert_same, bits, left_to_right, normal, spread
from tests.unit.ranks import on_ranks

DEGREES = (1, 2, 4, 8)
LEAVES = spread(8, 512, seed=1).float() * spread(8, 512, seed=2).float()
FOUR = torch.tensor([1.0, 2**-24, 2**-24, 2**-24])


def test_a_tree_adds_neighbours_first() -> None:
    a = LEAVES
    assert_same(tree_sum(a), ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])))
    assert_moved(left_to_right(a), tree_sum(a), "left to right")
    assert_moved(a.sum(0), tree_sum(a), "torch's sum")


@pytest.mark.parametrize("count", [0, 3, 6, 7])
def test_a_tree_of_other_sizes_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"1, 2, 4 or 8 leaves, got {count}"):
        tree_sum(LEAVES[:count])


def test_four_partials_have_three_answers() -> None:
    words = [int(bits(f(x))) for f, x in ((left_to_right, FOUR), (tree_sum, FOUR), (left_to_right, FOUR.flip(0)))]
    assert words == [0x3F800000, 0x3F800001, 0x3F800002]


@pytest.mark.parametrize("size", DEGREES)
def test_four_partials_have_one_answer_for_every_size(size: int) -> None:
    leaves = torch.cat([FOUR, torch.zeros(4)])
    found = on_ranks(size, 1, lambda c: tree_all_reduce(leaves[list(c.shards)], c.tp, "test"))
    assert [int(bits(f)) for f in found] == [0x3F800001] * size


@pytest.mark.parametrize("size", DEGREES)
def test_an_all_reduce_is_the_tree_on_every_rank(size: int) -> None:
    for found in on_ranks(size, 1, lambda c: tree_all_reduce(LEAVES[list(c.shards)], c.tp, "test")):
        assert_same(found, tree_sum(LEAVES))


@pytest.mark.parametrize("size", DEGREES)
def test_a_reduce_scatter_is_a_piece_of_the_tree(size: int) -> None:
    pieces = LEAVES.view(8, size, -1)
    found = on_ranks(1, size, lambda c: tree_reduce_scatter(pieces[list(c.slices)], c.cp, "test"))
    assert_same(torch.cat(found), tree_sum(LEAVES))


@pytest.mark.parametrize("size", [2, 4])
def test_an_ordinary_reduction_would_show(size: int) -> None:
    partials = [left_to_right(part) for part in LEAVES.chunk(size)]
    found = on_ranks(size, 1, lambda c: c.tp.all_reduce(partials[c.tp.rank], "test"))
    assert_moved(found[0], tree_sum(LEAVES), "partials summed locally from left to right")


@pytest.mark.parametrize("size", DEGREES)
def test_a_row_parallel_product_ignores_the_degree(size: int) -> None:
    x, w = spread(5, 8, 16, seed=3), spread(8, 24, 16, seed=4)
    ops = CanonicalOps()

    def product(c: ParallelContext) -> torch.Tensor:
        own = list(c.shards)
        return ops.row(x[:, own], ops.prepare_row(w[own]), c.tp, "test")

    for found in on_ranks(size, 1, product):
        assert_same(found, ops.row(x, ops.prepare_row(w), Alone(), "test"))


def test_a_row_parallel_product_is_as_accurate_as_torch(record_property: Record) -> None:
    """Against one matmul of the whole; leaves that were rounded on the way would be coarse alike on every rank."""
    x, w, ops = normal(64, 1024, seed=5), normal(96, 1024, seed=6, scale=1 / 32), CanonicalOps()
    shards = ops.prepare_row(torch.stack(w.chunk(8, 1)))
    found = ops.row(x.view(64, 8, 128), shards, Alone(), "test")
    assert_as_accurate(found, x @ w.t(), x.double() @ w.double().t(), record_property)


def test_alone_is_a_group_of_one() -> None:
    t, alone = LEAVES[:1], Alone()
    assert (alone.rank, alone.size) == (0, 1)
    assert_same(alone.all_gather(t, "test"), t[None])
    assert_same(alone.all_to_all(t, "test"), t)
    assert_same(tree_all_reduce(LEAVES, alone, "test"), tree_sum(LEAVES))


def test_threads_gather_in_rank_order() -> None:
    for rank, found in enumerate(on_ranks(1, 4, lambda c: c.cp.all_gather(torch.tensor([c.cp.rank]), "test"))):
        assert found.flatten().tolist() == [0, 1, 2, 3], f"rank {rank}"


def test_threads_exchange_one_piece_each() -> None:
    found = on_ranks(1, 4, lambda c: c.cp.all_to_all(10 * c.cp.rank + torch.arange(4), "test"))
    assert [f.tolist() for f in found] == [[r, 10 + r, 20 + r, 30 + r] for r in range(4)]


def test_a_failing_thread_releases_the_others() -> None:
    def fail_on_two(c: ParallelContext) -> torch.Tensor:
        if c.tp.rank == 2:
            raise ZeroDivisionError
        return c.tp.all_gather(FOUR, "test")

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):  # the cause, not the barrier that it broke
        on_ranks(4, 1, fail_on_two)
    assert time.monotonic() - began < 10


def every_movement(rank: int, group: Collective) -> dict[str, Any]:
    """What one of two ranks gets of each collective."""
    mine = LEAVES.view(2, 4, 2, -1)[rank]
    return {
        "place": (group.rank, group.size),
        "gather": group.all_gather(LEAVES[rank].to(torch.bfloat16), "gather"),
        "exchange": group.all_to_all(mine[0], "exchange"),
        "tree": tree_all_reduce(mine, group, "tree"),
        "scatter": tree_reduce_scatter(mine, group, "scatter"),
        "sum": group.all_reduce(torch.full((3,), rank + 1.0, dtype=torch.bfloat16), "sum"),
    }


def waited_in_vain(group: Collective) -> str:
    """What rank 0 says when rank 1 does not join."""
    if group.rank:
        return ""
    with pytest.raises(CollectiveTimeoutError) as caught:
        group.all_gather(FOUR, "layers.3.down")
    return str(caught.value)


def process(rank: int, folder: str) -> None:
    """One of two processes: every collective, then one that the peer does not join, then one before which it dies."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    gloo = GlooCollective(dist.new_group([0, 1]), "context parallel group")
    shared = SharedMemoryCollective(gloo, "context parallel group", 60)
    out: dict[str, Any] = {name: every_movement(rank, g) for name, g in (("gloo", gloo), ("shared", shared))}
    out["named"] = [name for name in os.listdir(mapping.FOLDER) if f"rlk-{os.getpid()}-" in name]
    impatient = GlooCollective(dist.new_group([0, 1], timeout=timedelta(seconds=0.5)), "tensor parallel group")
    out["gloo timeout"] = waited_in_vain(impatient)
    dist.barrier()
    out["shared timeout"] = waited_in_vain(SharedMemoryCollective(gloo, "tensor parallel group", 0.5))
    bereft = SharedMemoryCollective(gloo, "tensor parallel group", 60)
    out["shared death"] = waited_in_vain(bereft)
    torch.save(out, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=process, args=(rank, str(folder)), daemon=True) for rank in (0, 1)]
    for started in processes:
        started.start()
    for started in processes:
        started.join(120)
    assert [ended.exitcode for ended in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_bytes_move_in_rank_order(found: list[dict[str, Any]], transport: str, rank: int) -> None:
    moved = found[rank][transport]
    assert moved["place"] == (rank, 2)
    assert_same(moved["gather"], LEAVES[:2].to(torch.bfloat16))
    pieces = LEAVES.view(2, 4, 2, -1)[:, 0]
    assert_same(moved["exchange"], pieces[:, rank])
    assert moved["sum"].tolist() == [3.0] * 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_every_transport_reduces_by_the_tree(found: list[dict[str, Any]], transport: str, rank: int) -> None:
    whole = tree_sum(LEAVES.view(8, 2, -1))
    assert_same(found[rank][transport]["tree"], whole)
    assert_same(found[rank][transport]["scatter"], whole[rank])


def test_a_missing_peer_is_named_by_stage_and_group(found: list[dict[str, Any]]) -> None:
    words = "tensor parallel group: rank 0 of 2 waited in 'layers.3.down'"
    assert found[0]["gloo timeout"].startswith(f"{words} and a peer did not answer")
    assert found[0]["shared timeout"] == f"{words}: rank 1 did not come within 0.5 s"


def test_a_dead_peer_is_not_waited_for(found: list[dict[str, Any]]) -> None:
    assert found[0]["shared death"] == "tensor parallel group: rank 0 of 2 waited in 'layers.3.down': rank 1 is gone"


def test_shared_memory_has_no_name_once_it_is_open(found: list[dict[str, Any]]) -> None:
    assert found[0]["named"] == found[1]["named"] == []


@pytest.mark.parametrize("size", DEGREES[1:])
@pytest.mark.parametrize("room", [64, 1 << 20])
def test_shared_memory_moves_any_length(monkeypatch: pytest.MonkeyPatch, size: int, room: int) -> None:
    """Nothing, less than a buffer, and many buffers and a rest; each twice, so that a buffer is used again."""
    monkeypatch.setattr(shared_memory, "ROOM", room)

    def move(c: ParallelContext) -> list[torch.Tensor]:
        group = SharedMemoryCollective(c.tp, "test", 60)
        sent = [LEAVES.view(8, -1)[c.tp.rank, :n] for n in (0, 3, 511, 511)]
        pieces = [LEAVES.view(-1)[c.tp.rank * 64 :][: size * n].view(size, n) for n in (1, 63, 63)]
        gathered, exchanged = [group.all_gather(t, "test") for t in sent], [group.all_to_all(t, "test") for t in pieces]
        return [
            *gathered,
            *exchanged,
            *(c.tp.all_gather(t, "test") for t in sent),
            *(c.tp.all_to_all(t, "test") for t in pieces),
        ]

    for moved in on_ranks(size, 1, move):
        for ours, threads in zip(moved[:7], moved[7:], strict=True):
            assert_same(ours, threads)


def test_shared_memory_names_every_rank_that_does_not_come() -> None:
    def wait(c: ParallelContext) -> str:
        group = SharedMemoryCollective(c.tp, "group", 0.3)
        if c.tp.rank in (1, 6):
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.all_gather(FOUR, "stage")
        return str(caught.value)

    for rank, said in enumerate(on_ranks(8, 1, wait)):
        assert said in ("", f"group: rank {rank} of 8 waited in 'stage': rank 1, 6 did not come within 0.3 s")
        assert bool(said) == (rank not in (1, 6))
