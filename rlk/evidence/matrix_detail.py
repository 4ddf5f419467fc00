"""What one cell's run left beside its counts: events and times of each step, kernels, memory and GPUs of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue

from rlk.evidence.documents import Count, Number, Part
from rlk.evidence.plans import derived_record
from rlk.evidence.record import Record
from rlk.evidence.schemas import Derived, Generated, Holding, Kernel, Manifest, Metrics, Seconds
from rlk.plan.derive import Plan

GIVEN = ("cell", "command line")
"""Sources of an option's value that are a run's own; others are the profile's, the environment's and the defaults."""

PLACES = ("run_id", "output_root", "profile")
"""Options that say where a run's files are, and the profile, which has a field of its own."""


class CellStep(Part):
    """One step; `events` are counted by engine."""

    seconds: Seconds
    grad_norm: Number
    nonzero_advantages: Count
    response_tokens: Count
    events: tuple[Generated, ...]


class RankMemory(Part):
    """What one train rank held, and on which GPU."""

    gpu: str | None
    holdings: tuple[Holding, ...]
    freed_bytes: Count


class CellDetail(Part):
    """What a run was of, and what its directory says of it; of a run that failed, what there is."""

    sentence: str
    profile: str
    options: dict[str, JsonValue]
    """Option values that the cell or the command line gives, by field name, as they were changed for this run."""
    engine: dict[str, int] = Field(default_factory=dict)
    """Limits of one engine, by field of the profile's `engine`; files of before say none."""
    derived: Derived
    transport: str
    device: str
    run: str
    """Name of the run directory; empty where none was made."""
    steps: tuple[CellStep, ...] = ()
    tensors: Count = 0
    tensors_changed: Count = 0
    """How many of the exported `tensors` are another at the end than at the start."""
    kernels: tuple[Kernel, ...] = ()
    train: tuple[RankMemory, ...] = ()
    """By rank."""
    engines: tuple[tuple[str | None, ...], ...] = ()
    """The GPU of each rank of each engine."""
    unread: tuple[str, ...] = ()
    """One line for everything above that could not be read."""


def planned(plan: Plan) -> dict[str, Any]:
    """The fields that the plan decides: where they are equal, a run is of the same cell."""
    asked = plan.requested().items()
    return {
        "profile": plan.profile.name,
        "options": {name: said["value"] for name, said in asked if said["source"] in GIVEN and name not in PLACES},
        "engine": plan.profile.engine.model_dump(),
        "derived": derived_record(plan),
        "transport": plan.transport,
    }


def memory(manifest: Manifest) -> dict[str, int]:
    """Bytes that rank 0 of the trainer and of the first engine hold, by what they are of."""
    readback = manifest.readback
    if not (readback.train and readback.engines):
        return {}  # a run that failed was not asked
    train, engine = readback.train[0], readback.engines[0][0]
    held = {f"{one.name} ({one.during_rollout})": one.bytes for one in train.holdings}
    return {**held, "given back by the last offload": train.freed_bytes, "kv cache": engine.kv_cache_bytes}


def left(run_dir: str) -> dict[str, Any]:
    """The fields that a run directory holds; "" is that of a run that made none."""
    if not run_dir:
        return {"run": ""}
    found: dict[str, Any] = {"run": Path(run_dir).name}
    unread = []
    readers: tuple[Callable[[Record], dict[str, Any]], ...] = (_steps, _tensors, _readback)
    for read in readers:
        try:
            found |= read(Record(Path(run_dir)))
        except Exception as error:  # whatever is wrong with one directory, the next cell must still run
            unread.append(f"{type(error).__name__}: {error}")
    return {**found, "unread": tuple(unread)}


def _steps(record: Record) -> dict[str, Any]:
    return {"steps": tuple(map(_step, record.metrics))}


def _step(m: Metrics) -> CellStep:
    return CellStep(
        seconds=m.seconds,
        grad_norm=m.grad_norm,
        nonzero_advantages=m.nonzero_advantages,
        response_tokens=m.response_tokens,
        events=m.generated,
    )


def _tensors(record: Record) -> dict[str, Any]:
    before, after = record.fingerprints[0].trainer, record.fingerprints[-1].trainer
    return {"tensors": len(before), "tensors_changed": sum(before[name] != after.get(name) for name in before)}


def _readback(record: Record) -> dict[str, Any]:
    said = record.manifest.readback
    train = tuple(RankMemory(gpu=r.gpu, holdings=r.holdings, freed_bytes=r.freed_bytes) for r in said.train)
    engines = tuple(tuple(rank.gpu for rank in ranks) for ranks in said.engines)
    return {"kernels": record.manifest.kernels, "train": train, "engines": engines}
