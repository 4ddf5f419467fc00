"""Ranks as processes on the GPUs that are there, each with a gloo group to meet in; what each found comes back."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[dist.ProcessGroup, torch.device], dict[str, Any]]


def on_processes(size: int, work: Work, seconds: float, environment: dict[str, str] | None = None) -> list[Any]:
    """What work(group, device) returned on each of `size` processes, rank r on GPU r modulo the visible ones.

    Raises:
        AssertionError: a rank failed or did not end in `seconds`; says which and why. Its process is ended.
    """
    spawn = multiprocessing.get_context("spawn")
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment or {})
        try:
            told = [(r, size, work, folder, seconds) for r in range(size)]
            processes = [spawn.Process(target=_rank, args=args, daemon=True) for args in told]
            for process in processes:
                process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        end = time.monotonic() + seconds
        try:
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            late = [r for r, process in enumerate(processes) if process.is_alive()]
            for r in late:
                processes[r].kill()
        found = [_read(Path(folder), r) for r in range(size)]
    failed = [f"rank {r}: {f['failed']}" for r, f in enumerate(found) if "failed" in f]
    if late or failed:
        raise AssertionError(f"{failed or 'no rank failed'}; ranks {late} did not end in {seconds} s")
    return found


def _read(folder: Path, rank: int) -> dict[str, Any]:
    path, stack = folder / f"{rank}.json", folder / f"{rank}.stack"
    if path.exists():
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    return {"failed": f"left no result; was at {stack.read_text()[:1500] if stack.exists() else 'its start'}"}


def _rank(rank: int, size: int, work: Work, folder: str, seconds: float) -> None:
    with Path(folder, f"{rank}.stack").open("w") as stack:
        faulthandler.dump_traceback_later(0.9 * seconds, file=stack)
        _work(rank, size, work, folder)


def _work(rank: int, size: int, work: Work, folder: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        found = work(dist.new_group(list(range(size))), device)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc(limit=-3)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a context that a trap has ended cannot be taken down in order
