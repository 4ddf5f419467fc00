"""A decode step and a train step of rlk beside its native mode and vLLM's own model, each arm a process.

All arms start at once, which takes most of the time (imports, compilation, proofs). Then they are measured one after
the other, and what an arm found is in the file before the next one begins.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.step_sizes import ARMS, ROOT, Sizes, beside, environment, plan

SCHEMA = "rlk.bench-steps/1"
POLL_S = 0.05
Start = Callable[[str, Path], "subprocess.Popen[bytes]"]


def starter(profile: str, sizes: Sizes) -> Start:
    """What starts the process of an arm; its output goes to ARM.log."""

    def start(arm: str, folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.bench.step_arm", arm, str(folder), profile, sizes.to_json()]
        env = environment(arm, plan(arm, profile, sizes), folder / "proofs")
        with (folder / f"{arm}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    return start


def run(
    arms: Sequence[str], start: Start, limits: tuple[float, float, float], tell: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """What each arm found, by arm; `tell` hears all of it after each arm.

    limits: seconds for all to be ready, for one to measure, and for everything.
    """
    ready_s, measure_s, all_s = limits
    begin, found = time.monotonic(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = {arm: start(arm, folder) for arm in arms}
        try:
            _wait(lambda: all(_settled(folder, arm, processes[arm]) for arm in arms), begin + ready_s)
            unready = [arm for arm in arms if not (folder / f"{arm}.ready").exists()]
            late = {arm for arm in unready if _end(processes[arm])}  # or it would compile while others are measured
            for arm, process in processes.items():
                (folder / f"{arm}.go").touch()
                until = min(time.monotonic() + measure_s, begin + all_s)
                _wait(lambda p=process: p.poll() is not None, until)
                late |= {arm} if _end(process) else set()
                found[arm] = _result(folder, arm, process.returncode, arm in late)
                tell(found)
        finally:
            for process in processes.values():
                _end(process)
    return found


def _settled(folder: Path, arm: str, process: subprocess.Popen[bytes]) -> bool:
    return (folder / f"{arm}.ready").exists() or process.poll() is not None


def _wait(done: Callable[[], bool], until: float) -> None:
    while not done() and time.monotonic() < until:
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Ends a process; whether it had to be."""
    if process.poll() is not None:
        return False
    process.kill()
    process.wait()
    return True


def _result(folder: Path, arm: str, code: int, late: bool) -> dict[str, Any]:
    """What the arm wrote; where it ended early also how, and the end of its output."""
    path = folder / f"{arm}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"what": ARMS.get(arm, arm)}
    if not found.get("complete"):
        stage = "measuring" if (folder / f"{arm}.ready").exists() else "starting"
        found["ended"] = f"{stage}: its time was over" if late else f"{stage}: exit code {code}"
        found["log"] = (folder / f"{arm}.log").read_text(errors="replace")[-3000:]
    return found


def measure(out: Path, arms: Sequence[str], profile: str, sizes: Sizes, limits: tuple[float, float, float]) -> None:
    """Runs the arms and writes the file after each of them."""
    begin = time.monotonic()
    record: dict[str, Any] = {
        "schema": SCHEMA, "command": sys.argv, "profile": profile, "sizes": json.loads(sizes.to_json()),
        "read": "Topology TP 1 on one GPU. Milliseconds are medians of wall time, scheduling and Python included: of a "
        "decode step from one end to the next, of score and update with what they started on the device. rlk's arms "
        "run as its own ranks do, cuBLAS's split-K off in both modes; the stock arms run cuBLAS as it comes.",
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)

    def tell(found: Mapping[str, Any]) -> None:
        record.update(beside=beside(found), arms=found, seconds=round(time.monotonic() - begin, 1))
        out.write_text(json.dumps(record, indent=1) + "\n")

    run(arms, starter(profile, sizes), limits, tell)
