"""Sums and gathers over CUDA IPC beside NCCL's, between processes on the visible GPUs, eager and in CUDA graphs.

    python -m tests.bench collectives --out FILE [--ranks 2] [--limit SECONDS]

One rank a GPU. With fewer GPUs than ranks they share them, and rlk's are measured alone: NCCL refuses that.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from rlk.kernels.collectives.base import Collective
from rlk.kernels.tree import tree_sum
from tools.gpu.ranks import on_processes

SCHEMA = "rlk.bench-collectives/1"
SIZES = (("8 KB", 1 << 11), ("64 KB", 1 << 14), ("2 MB", 1 << 19), ("32 MB", 1 << 23), ("128 MB", 1 << 25))
"""Elements of the whole tensor, and its bytes in fp32: what a rank puts into a sum, what it gets from a gather."""
EACH, REPEATS, WARM = 10, 9, 3
READ = (
    "Microseconds a call: medians of CUDA events around 10 calls in a row on rank 0, from Python (eager_us) or in "
    "one CUDA graph (graph_us). A size is that of the whole tensor in fp32; bf16 moves as many elements, so half the "
    "bytes. rms_error: of rank 0's result against float64, over the rms of that. rlk sums fp32 in the order of the "
    "tree; its gathers move bytes."
)
Timer = Callable[[Callable[[], Any]], dict[str, float]]


@dataclass(frozen=True)
class Op:
    """One collective of one library. `mine` cuts what this rank puts in out of its fp32 [n] in `dtype`,
    `call` gives its result."""

    op: str
    who: str
    dtype: torch.dtype
    mine: Callable[[torch.Tensor], torch.Tensor]
    call: Callable[[torch.Tensor], torch.Tensor]


def ours(c: Any) -> Iterator[Op]:
    """rlk's, on a transport that sums on the way (SummingCollective)."""
    size, rank = c.size, c.rank
    yield Op("all-reduce", "rlk", torch.float32, lambda t: t, lambda t: c.gather_tree(t, "bench all-reduce"))
    yield Op(
        "reduce-scatter", "rlk", torch.float32, lambda t: t.view(size, -1),
        lambda t: c.exchange_tree(t, "bench reduce-scatter"),
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        yield Op(
            "all-gather", "rlk", dtype, lambda t: t.view(size, -1)[rank],
            lambda t: c.all_gather(t, "bench all-gather").view(-1),
        )  # fmt: skip


def nccl(group: dist.ProcessGroup, size: int, rank: int) -> Iterator[Op]:
    """NCCL's through torch.distributed; an all-reduce in place, as frameworks call it."""

    def reduced(t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, group=group)
        return t

    def scattered(t: torch.Tensor) -> torch.Tensor:
        out = t.new_empty(t.numel() // size)
        dist.reduce_scatter_tensor(out, t, group=group)
        return out

    def gathered(t: torch.Tensor) -> torch.Tensor:
        out = t.new_empty(t.numel() * size)
        dist.all_gather_into_tensor(out, t, group=group)
        return out

    for dtype in (torch.float32, torch.bfloat16):
        yield Op("all-reduce", "nccl", dtype, torch.clone, reduced)
        yield Op("reduce-scatter", "nccl", dtype, lambda t: t, scattered)
        yield Op("all-gather", "nccl", dtype, lambda t: t.view(size, -1)[rank].contiguous(), gathered)


def contribution(n: int, rank: int, device: torch.device) -> torch.Tensor:
    """fp32 [n] of one rank, the same on every rank that asks: values of widely different size."""
    generator = torch.Generator(device).manual_seed(100 + rank)
    draw = partial(torch.randn, n, generator=generator, device=device)
    return draw() * draw().exp()


def exact(op: str, n: int, c: Collective, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's result in float64; of an all-gather the bytes that came, so that any error is one of movement."""
    parts = [contribution(n, r, device) for r in range(c.size)]
    if op == "all-gather":
        return torch.cat([p.view(c.size, -1)[r] for r, p in enumerate(parts)]).to(dtype).double()
    total = torch.stack([p.double() for p in parts]).sum(0)
    return total.view(c.size, -1)[c.rank] if op == "reduce-scatter" else total


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, over that of what is expected."""
    apart = (found.double().view(-1) - expected).square().mean().sqrt()
    return float(apart / expected.square().mean().sqrt())


def measured(op: Op, n: int, c: Collective, device: torch.device, timer: Timer) -> dict[str, Any]:
    """Error and times of one op at one size."""
    mine = op.mine(contribution(n, c.rank, device).to(op.dtype))
    result = op.call(mine)
    said: dict[str, Any] = {"rms_error": relative_error(result, exact(op.op, n, c, op.dtype, device))}
    if op.op == "all-reduce" and op.who == "rlk":
        tree = tree_sum(torch.stack([contribution(n, r, device) for r in range(c.size)]))
        said["equals_tree"] = torch.equal(result.view(torch.int32), tree.view(torch.int32))
    del result
    mine.zero_()  # what is summed in place again and again must not overflow
    return {**said, **timer(partial(op.call, mine))}


def events(call: Callable[[], Any]) -> dict[str, float]:
    """Medians of a call made from Python and of one in a graph."""

    def row() -> None:
        for _ in range(EACH):
            call()

    row()
    graph = torch.cuda.CUDAGraph()
    eager = _median_us(row)
    torch.cuda.synchronize()
    # Only this thread's calls are held to the rules of a capture: NCCL's watchdog asks for events on another.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        row()
    return {"eager_us": eager, "graph_us": _median_us(graph.replay)}


def _median_us(row: Callable[[], Any]) -> float:
    spans = []
    for _ in range(WARM + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        row()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / EACH)
    return round(median(spans[WARM:]), 1)


def everything(
    ops: Sequence[Op],
    c: Collective,
    device: torch.device,
    timer: Timer,
    path: Path | None,
    sizes: Sequence[tuple[str, int]] = SIZES,
) -> list[dict[str, Any]]:
    """Every op at every size; with a path, what is there so far is in that file."""
    entries = []
    for name, n in sizes:
        for op in ops:
            entry = {"op": op.op, "size": name, "who": op.who, "dtype": str(op.dtype).removeprefix("torch.")}
            entries.append({**entry, **measured(op, n, c, device, timer)})
            if path is not None:
                path.write_text(json.dumps(entries) + "\n")
    return entries


def work(path: str, shared: bool, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """One rank of the measurement; rank 0 keeps the file."""
    from rlk.kernels.collectives.ipc import IpcCollective  # here: it needs Triton and CUDA, which a CPU lacks

    c = IpcCollective(group, "bench", device, timeout_s=30.0)
    ops = list(ours(c))
    found: dict[str, Any] = {"transport": c.describe()}
    if not shared:
        other = dist.new_group(list(range(c.size)), backend="nccl")
        ops += nccl(other, c.size, c.rank)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["entries"] = everything(ops, c, device, events, Path(path) if c.rank == 0 else None)
    c.close()
    return found


def measure(out: Path, ranks: int, limit: int) -> None:
    """Runs the ranks and writes the file: what there is, where they fail or take longer."""
    gpus, partial_path = torch.cuda.device_count(), out.with_suffix(".partial")
    shared = gpus < ranks
    record: dict[str, Any] = {
        "schema": SCHEMA, "read": READ, "ranks": ranks, "gpus": min(gpus, ranks),
        "nccl_settings": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
        "environment": {
            "device": torch.cuda.get_device_properties(0).name, "torch": torch.__version__, "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }  # fmt: skip
    if shared:
        record["without_nccl"] = f"{ranks} ranks on {gpus} GPU: NCCL refuses two ranks on one"
    out.parent.mkdir(parents=True, exist_ok=True)
    partial_path.unlink(missing_ok=True)
    try:
        record |= on_processes(ranks, partial(work, str(partial_path), shared), limit)[0]
    except AssertionError as error:
        there = json.loads(partial_path.read_text()) if partial_path.exists() else []
        record |= {"entries": there, "error": str(error)[:3000]}
    record["speed"] = speeds(record["entries"])
    partial_path.unlink(missing_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


def speeds(entries: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """rlk's speed beside NCCL's, by op, size and dtype (1: as fast); its fp32 sums also beside NCCL's in bf16."""
    found: dict[str, dict[str, float]] = {}
    mine = [e for e in entries if e["who"] == "rlk"]
    for a in mine:
        for b in entries:
            if b["who"] != "nccl" or (a["op"], a["size"]) != (b["op"], b["size"]):
                continue
            if a["dtype"] != b["dtype"] and a["op"] == "all-gather":
                continue
            ratios = {k.removesuffix("_us"): round(b[k] / a[k], 3) for k in ("eager_us", "graph_us") if k in a}
            found[f"{a['op']} {a['size']}: {a['dtype']} against {b['dtype']}"] = ratios
    return found
