"""Where the ranks of a submitted run go on a Ray cluster: what is reserved, and what is started there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rlk.plan.derive import Plan

RECORD = ".submission.json"


@dataclass(frozen=True)
class Placement:
    """One placement group on one node: bundle i holds train rank i and rollout worker i, and so one GPU for both.

    All ranks of a run share a node: they exchange data through CUDA IPC or shared memory and meet on its loopback.
    `gpus` is 0 on a CPU; fewer GPUs than ranks are shared by several bundles, each of one GPU alone.
    """

    ranks: int
    workers: int
    gpus: int

    @property
    def bundles(self) -> tuple[dict[str, float], ...]:
        """Ray's resources by bundle."""
        gpu = {"GPU": self.gpus / self.ranks} if self.gpus else {}
        return tuple({"CPU": 1.0 + (slot < self.workers), **gpu} for slot in range(self.ranks))

    @property
    def actor_gpus(self) -> float:
        """The share of a GPU that an actor asks for: two of them fill a bundle."""
        return self.gpus / self.ranks / 2

    @property
    def total(self) -> dict[str, float]:
        """What the node must have free."""
        return {name: sum(bundle[name] for bundle in self.bundles) for name in self.bundles[0]}


def placement(plan: Plan, gpus_there: int) -> Placement:
    """The placement on a node with that many GPUs."""
    gpus = plan.profile.gpus_of(gpus_there) if plan.profile.device == "cuda" else 0
    return Placement(plan.ranks, plan.engines * plan.engine_ranks, gpus)


def submission_id(run_id: str) -> str:
    """The name of the job, chosen by us so that it says the run."""
    return f"rlk-{run_id}"


def record_path(output_root: Path, run_id: str) -> Path:
    """The file beside the run directory that the job reads: the plan, and what the submitting side looked like."""
    return output_root / f"{run_id}{RECORD}"


def entrypoint(python: str, record: Path) -> str:
    """The job's command. -P keeps the folder that Ray starts it in out of the way of the checkout's packages."""
    return shlex.join([python, "-P", "-m", "rlk", "job", str(record)])
