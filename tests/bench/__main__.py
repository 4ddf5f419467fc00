"""Measurements on a Hopper GPU, each one JSON file.

    python -m tests.bench ops --out FILE [--only TEXT] [--limit SECONDS]
    python -m tests.bench collectives --out FILE [--ranks 2] [--limit SECONDS]
    python -m tests.bench steps --out FILE [--arm ARM] [--profile hopper-small] [--limit SECONDS]

ops: every op, ours beside the ordinary one, in two processes one after the other on the same data: ours with split-K
off, the ordinary ops as the library comes. collectives: beside NCCL. Both need torch, Triton, cuda-bindings and click
alone. steps: a decode step and a train step beside native mode and vLLM's own model.
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
OUT = click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The JSON file.")


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


@click.group(help=__doc__)
def main() -> None:
    """See the module."""


@main.command()
@OUT
@click.option("--only", default="", help="Cases whose name has this text.")
@click.option("--limit", type=int, default=600, help="Seconds that each arm may take; what it has by then counts.")
def ops(out: Path, only: str, limit: int) -> None:
    """Every op beside the ordinary one."""
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
    facts = {key: value for key, value in arms["ours"].items() if key != "cases"}
    record = {"schema": "rlk.bench/1", "environment": facts, "entries": joined(arms["ours"], arms["ordinary"])}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    for e in record["entries"]:
        click.echo(f"{e['op']}, {e['size']}: {e.get('speed', e['ours'])}")


@main.command()
@OUT
@click.option(
    "--ranks", type=click.Choice(["2", "4", "8"]), default="2", help="Processes, one a GPU if there are so many."
)
@click.option("--limit", type=int, default=100, help="Seconds that it may take; what it has by then counts.")
def collectives(out: Path, ranks: str, limit: int) -> None:
    """Sums and gathers beside NCCL."""
    from tests.bench import collectives as bench

    bench.measure(out, int(ranks), limit)
    record = json.loads(out.read_text())
    for name, ratio in record["speed"].items():
        click.echo(f"{name}: {ratio}")
    click.echo(record.get("error", record.get("without_nccl", f"{len(record['entries'])} entries")))


@main.command()
@OUT
@click.option("--arm", "arms", multiple=True, help="Only this; may be repeated.")
@click.option("--profile", default="hopper-small", help="Model and device.")
@click.option("--sizes", default="{}", help="JSON of fields of tests.bench.step_sizes.Sizes.")
@click.option("--limit", type=float, default=150.0, help="Seconds for all arms; their start may take two thirds.")
@click.option("--measure", "each", type=float, default=30.0, help="Seconds that one arm may measure.")
def steps(out: Path, arms: tuple[str, ...], profile: str, sizes: str, limit: float, each: float) -> None:
    """A decode step and a train step beside native mode and vLLM's own model."""
    from tests.bench.step_sizes import ARMS, Sizes
    from tests.bench.steps import measure

    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise click.BadParameter(f"--arm {unknown[0]!r}: allowed is {', '.join(ARMS)}")
    chosen = Sizes.from_json(json.dumps({**json.loads(Sizes().to_json()), **json.loads(sizes)}))
    measure(out, arms or tuple(ARMS), profile, chosen, (limit * 2 / 3, each, limit))
    record = json.loads(out.read_text())
    for name, entry in record["beside"].items():
        click.echo(f"{name}: {entry}")
    for name, arm in record["arms"].items():
        click.echo(f"{name}: {arm.get('error', arm.get('ended', 'complete'))}")


if __name__ == "__main__":
    main()
