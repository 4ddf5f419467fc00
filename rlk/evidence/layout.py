"""Names of the files in a run directory, and of the processes that made it. Nothing else spells them."""

from __future__ import annotations

import re
from collections.abc import Iterable

MANIFEST = "manifest.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
TRAJECTORY = "trajectory.jsonl"
RAY_STATUS = "ray-status.txt"
LOG = "run.log"
VALIDATION = "run-validation.json"
SUMS = "SHA256SUMS"

STEP_DIRECTORY = re.compile(r"[0-9]{6,}")
FINGERPRINT_FILE = re.compile(r"v([0-9]{4,})\.json")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def step_directory(step: int) -> str:
    """Directory of one step, relative to the run directory; steps count from 0."""
    return f"steps/{step:06d}"


def rollout_file(step: int, engine: int) -> str:
    """What one engine generated in one step."""
    return f"{step_directory(step)}/rollout-{engine:02d}.safetensors"


def train_file(step: int, rank: int) -> str:
    """What one train rank scored in one step; rank = tp_rank * cp + cp_rank."""
    return f"{step_directory(step)}/train-{rank:02d}.safetensors"


def batch_file(step: int) -> str:
    """Rewards and advantages of one step."""
    return f"{step_directory(step)}/batch.safetensors"


def oracle_file(step: int) -> str:
    """What the independent model says of some tokens of one step."""
    return f"{step_directory(step)}/oracle.safetensors"


def fingerprint_file(version: int) -> str:
    """Fingerprints of one weight version: 0 is the initial weights, step s makes version s + 1."""
    return f"fingerprints/v{version:04d}.json"


def update_file(step: int) -> str:
    """Fingerprints of gradients and of the optimizer's state after one step."""
    return f"{step_directory(step)}/update.json"


def probe_file(step: int, role: str) -> str:
    """What one rank of a probed run recorded in one step."""
    return f"{step_directory(step)}/probe-{role}.safetensors"


def sealed_files(steps: int, engines: int, ranks: int, probed: Iterable[str] = ()) -> frozenset[str]:
    """Every file of a finished run except the seal itself; `probed` are the roles that record."""
    roles = tuple(probed)
    names = {MANIFEST, PLAN, METRICS, TRAJECTORY, RAY_STATUS, LOG, VALIDATION}
    names |= {fingerprint_file(version) for version in range(steps + 1)}
    for step in range(steps):
        names |= {batch_file(step), update_file(step), oracle_file(step)}
        names |= {rollout_file(step, engine) for engine in range(engines)}
        names |= {train_file(step, rank) for rank in range(ranks)}
        names |= {probe_file(step, role) for role in roles}
    return frozenset(names)


def train_role(rank: int) -> str:
    """Name of a train rank: of its Ray actor and of its process."""
    return f"train-{rank:02d}"


def engine_role(engine: int, rank: int) -> str:
    """Name of one rank of one engine: of its Ray actor and of its process."""
    return f"engine-{engine:02d}-{rank:02d}"


def roles(ranks: int, engines: int, engine_ranks: int) -> tuple[str, ...]:
    """Every actor of a run, train ranks first."""
    train = [train_role(rank) for rank in range(ranks)]
    rollout = [engine_role(engine, rank) for engine in range(engines) for rank in range(engine_ranks)]
    return (*train, *rollout)
