"""Runs the CUDA kernels and collectives on real Hopper GPUs: proofs, invariance, accuracy against float64.

    python tools/gpu_check.py --out DIR [--step proofs --step collectives] [--ranks 4] [--limit 150]

Needs torch, Triton and click alone: no vLLM, no Ray, no network. Every step has a time limit; what it saw is in
DIR/gpu-check.json as soon as it was seen, its log in DIR/gpu-check.log. The exit code is 1 if any entry failed.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

SPLIT_K_OFF = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
if any(os.environ.get(key) != value for key, value in SPLIT_K_OFF.items()):  # cuBLAS reads them when Python starts
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SPLIT_K_OFF})
os.environ.setdefault("RLK_ATTENTION", "triton")  # what is chosen by default comes with vLLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click  # noqa: E402  # after the environment is set, and torch only then
import torch  # noqa: E402
import triton  # noqa: E402

from tools.gpu import accuracy, collectives, cpu_bits, invariance, proofs, sampling  # noqa: E402
from tools.gpu.report import Report  # noqa: E402

log = logging.getLogger("gpu_check")
STEPS: dict[str, tuple[Callable[[Report], None], int]] = {
    "sampling": (sampling.run, 90),
    "collectives": (collectives.run, 250),
    "cpu_bits": (cpu_bits.run, 90),
    "invariance": (invariance.run, 150),
    "proofs": (proofs.run, 240),
    "accuracy": (accuracy.run, 60),
}
"""Each step and the seconds it may take, the informative ones first."""


class Compiles:
    """Counts what Triton compiled, and how long that took."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's compilation listener."""
        if not cache_hit:
            self.count += 1
            self.seconds += times.total / 1e6


def environment() -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    p = torch.cuda.get_device_properties(0)
    return {
        "device": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count,
        "memory_bytes": p.total_memory, "devices": torch.cuda.device_count(), "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__, "python": platform.python_version(), "command": sys.argv,
        "choices": {key: os.environ[key] for key in SPLIT_K_OFF},
    }  # fmt: skip


def out_of_time(_signal: int, _frame: FrameType | None) -> None:
    """Ends a step from within."""
    raise TimeoutError("the step's time is over")


def run_step(report: Report, name: str, limit: int | None) -> None:
    """One step; whatever it raises is an entry, and the next step runs."""
    call, seconds = STEPS[name]
    report.step = name
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(limit or seconds)
    start = time.monotonic()
    try:
        call(report)
        torch.cuda.synchronize()
        report.add("whole step", True, seconds=round(time.monotonic() - start, 1))
    except Exception as error:
        log.exception("step %s", name)
        report.add("whole step", False, error=f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of JSON and log.")
@click.option("--step", "steps", multiple=True, type=click.Choice(list(STEPS)), help="Only these steps, in order.")
@click.option("--limit", type=int, help="Seconds a step may take, instead of its own limit.")
@click.option("--ranks", multiple=True, type=click.Choice(["2", "4", "8"]), help="Only so many ranks a group.")
def main(out: Path, steps: tuple[str, ...], limit: int | None, ranks: tuple[str, ...]) -> None:
    """Checks the kernels on this machine's first GPU, and the collectives on all visible ones."""
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=out / "gpu-check.log", level=logging.INFO, format="%(asctime)s %(message)s")
    report = Report(out / "gpu-check.json", environment())
    compiles = Compiles()
    triton.knobs.compilation.listener = compiles
    collectives.sizes = tuple(map(int, ranks)) or collectives.SIZES
    for name in steps or STEPS:
        run_step(report, name, limit)
        report.set("compiles", {"count": compiles.count, "seconds": round(compiles.seconds, 1)})
        click.echo(f"{name}: {[e for e in report.failed if e.startswith(name)] or 'passed'}")
    entries = [e for e in report.data["entries"] if e["passed"] is not None]
    click.echo(f"{len(entries)} checks, {len(report.failed)} failed; {compiles.count} compiles; {report.path}")
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
