"""A long run of the tiny profile: no mismatch, and every process holds at the end what it held near the start."""

from __future__ import annotations

import platform
import secrets
import shlex
import sys
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import click
import psutil

from rlk.driver.processes import interruptible
from rlk.driver.progress import LiveView, Watch
from rlk.driver.provenance import revision, versions
from rlk.driver.run import execute_in
from rlk.driver.session import Session
from rlk.evidence.resources import Held, SoakEvidence, growth
from rlk.plan.load import load_plan
from rlk.plan.naming import new_run_id

ROOT = Path(__file__).parents[1]


class Samples:
    """A Watch that looks at every process of the session at the start of each `every`th step."""

    def __init__(self, view: Watch, session: Session, every: int) -> None:
        self.view, self.session, self.every = view, session, every
        self.steps: list[int] = []
        self._seen: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))

    def phase(self, step: int | None, name: str) -> None:
        """See Watch."""
        self.view.phase(step, name)
        if name == "rollout" and step is not None and step % self.every == 0:
            self.steps.append(step)
            ranks = {owned.role: owned.pid for owned in self.session.cluster.ledger.owned if "-" in owned.role}
            for role, pid in {"driver": psutil.Process().pid, **ranks}.items():
                self._look(role, psutil.Process(pid))

    def tokens(self, count: int) -> None:
        """See Watch."""
        self.view.tokens(count)

    def _look(self, role: str, process: psutil.Process) -> None:
        seen = self._seen[role]
        seen["rss"].append(process.memory_info().rss)
        seen["shm"].append(_shared(process.pid))
        seen["files"].append(process.num_fds())
        seen["threads"].append(process.num_threads())

    @property
    def processes(self) -> dict[str, Held]:
        """What was seen, by role."""
        return {role: Held(**{name: tuple(v) for name, v in seen.items()}) for role, seen in self._seen.items()}


def _shared(pid: int) -> int:
    """Bytes of /dev/shm that a process maps."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if " /dev/shm/" in line:
            first, end = line.split()[0].split("-")
            total += int(end, 16) - int(first, 16)
    return total


@click.command()
@click.option("--steps", default=200, help="updates")
@click.option("--every", default=5, help="steps between two looks at the processes")
@click.option("--tp", default=2, help="tensor parallelism of the trainer")
@click.option("--rollout-tp", default=2, help="tensor parallelism of an engine")
@click.option("--output", default=str(ROOT / "docs" / "evidence" / "soak-cpu.json"), help="the evidence file")
@click.option("--runs", default=str(ROOT / "runs" / "soak"), help="folder of the run directory")
def main(steps: int, every: int, tp: int, rollout_tp: int, output: str, runs: str) -> None:
    """Runs it and writes the evidence. Exit code 0 if the run passed and nothing grew."""
    sampling = {"temperature": 0.7, "top_p": 0.95}
    said = {"steps": steps, "tp": tp, "rollout_tp": rollout_tp, "output_root": runs, "profile": "tiny-cpu", **sampling}
    plan = load_plan("run", said, {}, ROOT)
    plan = plan.with_run_id(new_run_id(plan.cell, datetime.now(), secrets.token_hex(2)))
    began, code = time.monotonic(), revision()
    with LiveView(sys.stderr, steps) as view, interruptible(), Session(plan) as session:
        session.start(view)
        samples = Samples(view, session, every)
        outcome = execute_in(session, plan, samples)
    evidence = SoakEvidence(
        command=shlex.join(["python", "-m", "tools.soak", *sys.argv[1:]]),
        device=f"{platform.processor() or platform.machine()}, CPU",
        versions=versions(),
        revision=code,
        id=plan.cell,
        length=outcome.steps,
        tokens=outcome.tokens_compared,
        mismatches=outcome.mismatching_tokens,
        seconds=round(time.monotonic() - began, 1),
        digest=outcome.digest,
        passed=outcome.passed,
        steps=tuple(samples.steps),
        processes=samples.processes,
        errors=outcome.errors,
    )
    Path(output).write_text(evidence.to_json(indent=None) + "\n", encoding="utf-8")
    grown = list(growth(evidence.processes))
    for line in (*outcome.errors, *grown):
        click.echo(line)
    click.echo(f"{outcome.steps} steps, {outcome.tokens_compared} tokens, {outcome.mismatching_tokens} mismatches")
    sys.exit(0 if outcome.passed and not grown else 1)


if __name__ == "__main__":
    main()
