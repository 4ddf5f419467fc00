"""Reads a run directory, piece by piece and only when asked. What cannot be read raises EvidenceError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlk.evidence import layout
from rlk.evidence.arrays import I64, BatchArrays, OracleArrays, RolloutArrays, TrainArrays
from rlk.evidence.digest import weights_hash
from rlk.evidence.documents import Document
from rlk.evidence.errors import EvidenceError
from rlk.evidence.locate import Search, search_step
from rlk.evidence.plans import probed_roles, read_plan
from rlk.evidence.probe import Probe
from rlk.evidence.ray_status import RayStatus
from rlk.evidence.samples import Samples, Scored, join, merge
from rlk.evidence.schemas import (
    EngineReadback,
    Fingerprints,
    Manifest,
    Metrics,
    TrainReadback,
    TrajectoryLine,
    Update,
)
from rlk.evidence.seal import walk
from rlk.plan.derive import Plan

_Line = TypeVar("_Line", Metrics, TrajectoryLine)
_Doc = TypeVar("_Doc", bound=Document)


@dataclass(frozen=True)
class StepRecord:
    """The arrays of one step: rollouts by engine, trains by rank. `probes` reads what its ranks recorded."""

    step: int
    plan: Plan
    rollouts: tuple[RolloutArrays, ...]
    trains: tuple[TrainArrays, ...]
    batch: BatchArrays
    probes: Callable[[], tuple[Probe, ...]]

    @cached_property
    def samples(self) -> Samples:
        """All samples of the step by id."""
        try:
            return merge(self.rollouts)
        except EvidenceError as error:
            raise EvidenceError(f"step {self.step}: {error}") from error

    @cached_property
    def scored(self) -> tuple[Scored, ...]:
        """By TP rank, the tokens that its CP ranks scored, by key."""
        cp = self.plan.train.cp
        try:
            return tuple(join(self.trains[first : first + cp]) for first in range(0, len(self.trains), cp))
        except EvidenceError as error:
            raise EvidenceError(f"step {self.step}: {error}") from error

    @cached_property
    def matched(self) -> tuple[I64, I64]:
        """Positions in `samples` and in `scored[0]` of every token that both hold; `token_coverage` finds the rest."""
        _, left, right = np.intersect1d(self.samples.key, self.scored[0].key, return_indices=True)
        return left, right

    @cached_property
    def search(self) -> tuple[Search, int]:
        """See rlk.evidence.locate.search_step; once for all checks that say where."""
        return search_step(self.plan, self.probes())


class Record:
    """One run directory. Nothing is written, and no path enters what is said about it."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise EvidenceError(f"{run_dir.name}: there is no such run directory")
        self.run_dir = run_dir

    @cached_property
    def plan(self) -> Plan:
        """plan.json."""
        return read_plan(self._text(layout.PLAN))

    @cached_property
    def manifest(self) -> Manifest:
        """manifest.json."""
        return self._document(Manifest, layout.MANIFEST)

    @cached_property
    def metrics(self) -> tuple[Metrics, ...]:
        """metrics.jsonl, in the order of the file."""
        return self._lines(Metrics, layout.METRICS)

    @cached_property
    def trajectory(self) -> tuple[TrajectoryLine, ...]:
        """trajectory.jsonl, in the order of the file."""
        return self._lines(TrajectoryLine, layout.TRAJECTORY)

    @cached_property
    def ray(self) -> RayStatus:
        """ray-status.txt."""
        return RayStatus.from_text(self._text(layout.RAY_STATUS))

    @cached_property
    def fingerprints(self) -> tuple[Fingerprints, ...]:
        """The fingerprints of version 0 to the number of steps of the plan."""
        return tuple(self._fingerprints(version) for version in range(self.plan.config.steps + 1))

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Every file of the directory, relative and sorted."""
        return tuple(walk(self.run_dir))

    def metrics_of(self, step: int) -> Metrics:
        """The one line of metrics.jsonl for a step."""
        return self._one(self.metrics, step, layout.METRICS)

    def trajectory_of(self, step: int) -> TrajectoryLine:
        """The one line of trajectory.jsonl for a step."""
        return self._one(self.trajectory, step, layout.TRAJECTORY)

    def train_readback(self) -> dict[str, TrainReadback]:
        """What each train rank reported, by role."""
        return {layout.train_role(rank): said for rank, said in enumerate(self.manifest.readback.train)}

    def engine_readback(self) -> dict[str, EngineReadback]:
        """What each rank of each engine reported, by role."""
        return {
            layout.engine_role(engine, rank): said
            for engine, ranks in enumerate(self.manifest.readback.engines)
            for rank, said in enumerate(ranks)
        }

    def step(self, step: int) -> StepRecord:
        """The arrays of one step, read anew on each call."""
        plan = self.plan
        rollouts = tuple(self._rollout(step, engine) for engine in range(plan.engines))
        trains = tuple(self._train(step, rank, plan.train.cp) for rank in range(plan.ranks))
        name = layout.batch_file(step)
        batch = BatchArrays.read(self.run_dir / name, name, {"step": step})
        return StepRecord(step, plan, rollouts, trains, batch, partial(self.probes, step))

    def oracle(self, step: int) -> OracleArrays:
        """What the oracle says of one step, computed with the weights of that step's version."""
        name, weights = layout.oracle_file(step), weights_hash(self.fingerprints[step].trainer)
        return OracleArrays.read(self.run_dir / name, name, {"step": step, "weights": weights})

    def update(self, step: int) -> Update:
        """update.json of one step."""
        name = layout.update_file(step)
        found = self._document(Update, name)
        if found.step != step:
            raise EvidenceError(f"{name}: says step {found.step}")
        return found

    def probes(self, step: int) -> tuple[Probe, ...]:
        """What every rank of a probed run recorded in one step."""
        plan, found = self.plan, []
        for role in probed_roles(plan):
            name = layout.probe_file(step, role)
            probe = Probe.read(self.run_dir / name, name, step, role)
            native, tied = plan.config.mode == "native", plan.shape.tie_word_embeddings
            if problem := probe.problem(plan.shape.layers, native=native, tied=tied):
                raise EvidenceError(f"{name}: {problem}")
            found.append(probe)
        return tuple(found)

    def validation_text(self) -> str:
        """run-validation.json as it stands."""
        return self._text(layout.VALIDATION)

    def _rollout(self, step: int, engine: int) -> RolloutArrays:
        name = layout.rollout_file(step, engine)
        return RolloutArrays.read(self.run_dir / name, name, {"step": step, "engine": engine})

    def _train(self, step: int, rank: int, cp: int) -> TrainArrays:
        name = layout.train_file(step, rank)
        place = {"step": step, "rank": rank, "tp_rank": rank // cp, "cp_rank": rank % cp}
        return TrainArrays.read(self.run_dir / name, name, place)

    def _fingerprints(self, version: int) -> Fingerprints:
        name = layout.fingerprint_file(version)
        found = self._document(Fingerprints, name)
        if found.version != version:
            raise EvidenceError(f"{name}: says version {found.version}")
        return found

    def _document(self, kind: type[_Doc], name: str) -> _Doc:
        return kind.from_json(self._text(name), name)

    def _lines(self, kind: type[_Line], name: str) -> tuple[_Line, ...]:
        text = self._text(name)
        if text and not text.endswith("\n"):
            raise EvidenceError(f"{name}: does not end with a newline, so the last line may be cut")
        lines = text.split("\n")[:-1]
        return tuple(kind.from_json(line, f"{name} line {number}") for number, line in enumerate(lines, start=1))

    def _one(self, lines: tuple[_Line, ...], step: int, name: str) -> _Line:
        found = [line for line in lines if line.step == step]
        if len(found) != 1:
            raise EvidenceError(f"{name}: {len(found)} lines for step {step}, exactly one is needed")
        (line,) = found
        return line

    def _text(self, name: str) -> str:
        try:
            return (self.run_dir / name).read_bytes().decode("utf-8")
        except FileNotFoundError as error:
            raise EvidenceError(f"{name}: missing") from error
        except OSError as error:
            raise EvidenceError(f"{name}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise EvidenceError(f"{name}: not UTF-8 at byte {error.start}") from error
