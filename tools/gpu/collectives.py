"""CUDA IPC collectives between 2, 4 and 8 processes on the visible GPUs: the bytes of one process, captured or not.

Data is order-sensitive, and a sum from left to right must differ. At the end of each group its last rank stays away
from one call: the others must say so, by rank and stage.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlk.kernels.collectives.base import (
    Collective,
    CollectiveTimeoutError,
    integer_sum,
    maximum,
    tree_all_reduce,
    tree_reduce_scatter,
)
from rlk.kernels.collectives.ipc import IpcCollective
from rlk.kernels.tree import VIRTUAL, tree_sum
from tools.gpu.data import equal, moved
from tools.gpu.ranks import on_processes
from tools.gpu.report import Report

SIZES = (2, 4, 8)
sizes = SIZES
"""Those that are run."""
ARENA = 4 << 20
"""Small, so that sums of a few megabytes take several turns."""
REPLAYS = 60
SECONDS = 60


def run(report: Report) -> None:
    """One entry a size; the four run with a setting of torch's allocator whose own memory CUDA IPC cannot export.

    A size that fails is the last: processes that wait for one another would take their whole time each."""
    for size in sizes:
        setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if size == 4 else {}
        name = f"{size} processes" + "".join(f", {key}={value}" for key, value in setting.items())
        report.check(name, lambda n=size, s=setting: on_processes(n, everything, SECONDS, s)[0])
        if f"{report.step}: {name}" in report.failed:
            break


def everything(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """All of it on one rank."""
    found, began = eager(group, device), time.monotonic()
    c = IpcCollective(group, "check", device, timeout_s=8.0, arena_bytes=ARENA)
    found["captured"] = captured(c, device)
    c.close()
    large = IpcCollective(group, "times", device, timeout_s=8.0)
    found |= {"describe": large.describe(), "us": times(large, device)}
    large.close()
    found["seconds"] = round(time.monotonic() - began, 1)
    found["missing"] = stays_away(group, device)
    return found


def eager(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Every collective once, called from Python."""
    c = IpcCollective(group, "check", device, timeout_s=8.0, arena_bytes=ARENA)
    found = {"sums": sums(c, device), "moves": moves(c, device)}
    c.close()
    return found


def leaves(n: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    """[8, n] fp32, the same on every rank, of widely different size."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = [torch.randn(VIRTUAL, n, generator=generator, device=device) for _ in range(3)]
    return parts[0] * (2 * parts[1]).exp() * parts[2]


def held(c: Collective, whole: torch.Tensor) -> torch.Tensor:
    """The leaves of this rank."""
    each = VIRTUAL // c.size
    return whole[c.rank * each : (c.rank + 1) * each]


def sums(c: Collective, device: torch.device) -> dict[str, int]:
    """All-reduce and reduce-scatter against the tree in one process; returns how many elements another order moves."""
    control = {}
    for n in (8, 1000, 65_536, 65_537, 400_000, 1_600_000):
        whole = leaves(n, device)
        expected, chain = tree_sum(whole), whole[0]
        for leaf in whole[1:]:
            chain = chain + leaf
        control[str(n)] = moved(chain, expected)
        equal(tree_all_reduce(held(c, whole), c, "sum"), expected, f"all-reduce of {n}")
        if n % c.size == 0:
            pieces = held(c, whole).view(-1, c.size, n // c.size)
            mine = expected.view(c.size, -1)[c.rank]
            equal(tree_reduce_scatter(pieces, c, "scatter"), mine, f"reduce-scatter of {n}")
    if not all(control[n] for n in control if int(n) >= 1000):
        raise AssertionError(f"the data cannot tell orders apart: {control}")
    return control


def moves(c: Collective, device: torch.device) -> str:
    """Gathers and exchanges of several types and sizes; integer sums; maxima."""
    generator = torch.Generator(device).manual_seed(2)
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool):
        for n in (1, 5, 4096, 700_001):
            t = torch.randint(0, 100, (c.size, c.size, n), generator=generator, device=device).to(dtype)
            equal(c.all_gather(t[c.rank], "gather"), t, f"gather of {n} {dtype}")
            equal(c.all_to_all(t[c.rank], "exchange"), t[:, c.rank], f"exchange of {n} {dtype}")
    t = torch.randint(-(2**62), 2**62, (c.size, 999), generator=generator, device=device)
    equal(integer_sum(t[c.rank], c, "masses"), t.sum(0), "integer sum")
    equal(maximum(t[c.rank], c, "largest"), t.amax(0), "maximum")
    return "five types, four sizes"


def captured(c: IpcCollective, device: torch.device) -> str:
    """A graph with an odd number of turns, replayed on new inputs without a pause, between turns outside of it.

    Ranks come early and late in turn, by a delay on the device.
    """
    n = 64 * 1024
    table = torch.stack([leaves(n, device, seed=10 + i) for i in range(6)])
    x = torch.zeros_like(held(c, table[0]))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        total = tree_all_reduce(x, c, "layers.0.o")
        return total, c.all_gather(total.to(torch.bfloat16)[:100], "layers.0.kv")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, gathered = step()
        last = tree_all_reduce(x + 1.0, c, "layers.1.o")
    found = []
    for i in range(REPLAYS):
        if i % c.size == c.rank:
            torch.cuda._sleep(200_000)
        x.copy_(held(c, table[i % 6]))
        graph.replay()
        outside = tree_all_reduce(x, c, "outside") if i % 3 == 0 else total
        found.append((total.clone(), gathered.clone(), last.clone(), outside.clone()))
    c.settle()
    for i, (a, b, z, o) in enumerate(found):
        whole = table[i % 6]
        expected = tree_sum(whole)
        equal(a, expected, f"replay {i}")
        equal(o, expected, f"replay {i}, outside")
        equal(b, expected.to(torch.bfloat16)[:100].expand(c.size, -1), f"replay {i}, gather")
        equal(z, tree_sum(torch.stack([tree_sum(p + 1.0) for p in whole.chunk(c.size)])), f"replay {i}, third")
    return f"{REPLAYS} replays of three collectives"


def times(c: IpcCollective, device: torch.device) -> dict[str, float]:
    """Microseconds of one collective in a graph of ten, medians of replays, as rank 0 sees them."""
    found = {}
    for name, n in (("all-reduce 8 KB", 2048), ("all-reduce 1 MB", 1 << 18), ("all-reduce 32 MB", 1 << 23)):
        found[name] = in_graph(partial(c.gather_tree, torch.ones(n, device=device), name))
    t = torch.ones(c.size, (16 << 20) // c.size, device=device)
    found["reduce-scatter 64 MB"] = in_graph(partial(c.exchange_tree, t, "scatter"))
    found["gather of 1 MB each"] = in_graph(partial(c.all_gather, torch.ones(1 << 18, device=device), "gather"))
    return found


def in_graph(call: Any, each: int = 10, replays: int = 7) -> float:
    """Median over replays of a graph of `each` calls, in microseconds a call."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(each):
            call()
    spans = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / each)
    return round(sorted(spans)[replays // 2], 1)


def stays_away(group: dist.ProcessGroup, device: torch.device) -> str:
    """The last rank never calls; every other one is told. The device's work of those ends there, so this comes last."""
    c = IpcCollective(group, "tensor parallel group", device, timeout_s=3.0, arena_bytes=ARENA)
    t, absent = torch.ones(1000, device=device), c.size - 1
    c.gather_tree(t, "layers.2.o")
    c.settle()
    said, began = f"rank {absent} stayed away", time.monotonic()
    if c.rank != absent:
        try:
            c.gather_tree(t, "layers.3.down")
            c.settle()
        except CollectiveTimeoutError as error:
            said = str(error)
        else:
            said = "nobody said anything"
    dist.barrier(group)
    expected = (
        f"tensor parallel group: rank {c.rank} of {c.size} waited 3 s in 'layers.3.down' and rank {absent} did not come"
    )
    if c.rank != absent and said != expected:
        raise AssertionError(f"said {said!r}, not {expected!r}")
    return f"{said} (after {time.monotonic() - began:.1f} s)"
