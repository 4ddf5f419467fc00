"""Ours beside the ordinary op, every op, one JSON file.

    python -m tests.bench --out FILE [--only TEXT] [--limit SECONDS]

Two processes one after the other on the same data: ours with split-K off, the ordinary ops as the library comes. With
two GPUs or more, the collectives beside NCCL. Needs torch, Triton, cuda-bindings and click alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
SPLIT_K_OFF = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def environment(arm: str) -> dict[str, str]:
    """Of one arm's process."""
    plain = {k: v for k, v in os.environ.items() if k not in SPLIT_K_OFF and not k.startswith("RLK_")}
    return plain | (SPLIT_K_OFF if arm == "ours" else {})


def joined(ours: dict[str, Any], ordinary: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a case: both arms, and how they compare (more than 1: ours is faster; less accurate)."""
    theirs = {(c["op"], c["size"]): c for c in ordinary["cases"]}
    entries = []
    for case in ours["cases"]:
        other = theirs.get((case["op"], case["size"]), {})
        entry = {"op": case["op"], "size": case["size"], "ours": case.get("measured", case.get("error"))}
        if other.get("measured") or "error" in other:
            entry["ordinary"] = other.get("measured", other.get("error"))
        if case.get("measured") and other.get("measured"):
            (base,) = other["measured"].values()
            entry["speed"] = {name: round(base["us"] / m["us"], 3) for name, m in case["measured"].items()}
            if base.get("rms_error"):
                errors = {n: round(m["rms_error"] / base["rms_error"], 4) for n, m in case["measured"].items()}
                entry["error_ratio"] = errors
        entries.append(entry)
    return entries


def collectives(path: Path, limit: int) -> Any:
    """All-reduces beside NCCL's, or why there are none."""
    count = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())
    if count < 2:
        return f"{count} GPU: NCCL refuses two ranks on one"
    command = [sys.executable, "-m", "tests.bench.collectives", str(path)]
    subprocess.run(command, cwd=ROOT, env=environment("ordinary"), check=True, timeout=limit)
    return json.loads(path.read_text())


@click.command()
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The JSON file.")
@click.option("--only", default="", help="Cases whose name has this text.")
@click.option("--limit", type=int, default=600, help="Seconds that each arm may take; what it has by then counts.")
def main(out: Path, only: str, limit: int) -> None:
    """Measures and writes FILE."""
    arms: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in ("ours", "ordinary"):
            path = Path(folder) / arm
            command = [sys.executable, "-m", "tests.bench.arm", arm, str(path), only]
            try:
                subprocess.run(command, cwd=ROOT, env=environment(arm), check=True, timeout=limit)
            except subprocess.TimeoutExpired:
                click.echo(f"{arm}: ended after {limit} s, the rest is missing", err=True)
            arms[arm] = json.loads(path.read_text()) if path.exists() else {"cases": []}
        moved = collectives(Path(folder) / "collectives", limit)
    facts = {key: value for key, value in arms["ours"].items() if key != "cases"}
    record = {"schema": "rlk.bench/1", "environment": facts, "entries": joined(arms["ours"], arms["ordinary"])}
    record["collectives"] = moved
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    for e in record["entries"]:
        click.echo(f"{e['op']}, {e['size']}: {e.get('speed', e['ours'])}")


if __name__ == "__main__":
    main()
