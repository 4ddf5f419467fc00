"""The manifest of a run, from the plan and from what the processes said of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlk.driver.processes import Owned
from rlk.driver.provenance import repository, runtime, versions
from rlk.driver.readback import engine_record
from rlk.evidence.plans import derived_record, topology_record
from rlk.evidence.schemas import (
    GREEDY_CONVENTION,
    KL_CONVENTION,
    Kernel,
    Manifest,
    Memory,
    Process,
    Readback,
    Requested,
    Status,
    TrainReadback,
)
from rlk.plan.derive import Plan


@dataclass
class Said:
    """What the processes said of themselves; empty until they were asked."""

    proofs: Sequence[tuple[str, str, str]] = ()
    train: Sequence[Mapping[str, Any]] = ()
    engines: Sequence[Sequence[Mapping[str, Any]]] = ()


@dataclass(frozen=True)
class ManifestMaker:
    """Makes the manifests of one run: as it starts, and as it ends."""

    plan: Plan
    arguments: tuple[str, ...]
    run_dir: Path
    submitted: Mapping[str, str] = field(default_factory=dict)
    """Where a submitted run was submitted to, and as what."""
    said: Said = field(default_factory=Said)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def make(
        self, status: Status, error: str | None = None, processes: Sequence[Owned] = (), *, outlive: bool = False
    ) -> Manifest:
        """The manifest now. `outlive`: the actors go on to the session's next run."""
        plan = self.plan
        return Manifest(
            run_id=plan.run_id,
            command=plan.config.command,
            arguments=self.arguments,
            mode=plan.config.mode,
            created=self.created,
            status=status,
            error=error,
            requested={name: Requested.model_validate(value) for name, value in plan.requested().items()},
            effective=plan.effective(),  # type: ignore[arg-type]  # JSON values by construction
            topology=topology_record(plan),
            derived=derived_record(plan),
            profile=plan.profile.name,
            versions=versions(),
            repository=repository(),
            runtime={**runtime(plan, self.run_dir), **self.submitted},
            memory=Memory(offload=plan.offload, reason=_memory_reason(plan)),
            kl_convention=KL_CONVENTION,
            greedy_convention=GREEDY_CONVENTION,
            processes=tuple(Process(pid=p.pid, started=p.started, role=p.role) for p in processes),
            actors_outlive_run=outlive,
            notes=plan.notes,
            **self.told(),
        )

    def told(self) -> dict[str, Any]:
        """The fields that processes said; raises what their schemas raise for a value that they refuse."""
        said = self.said
        return {
            "kernels": tuple(Kernel(name=n, form=f, proof=p) for n, f, p in said.proofs),
            "readback": Readback(
                train=tuple(TrainReadback(**r) for r in said.train),
                engines=tuple(tuple(map(engine_record, ranks)) for ranks in said.engines),
            ),
        }


def _memory_reason(plan: Plan) -> str:
    if plan.offload:
        return "train TP and rollout TP are both 1 on a GPU: the training state leaves it while engines generate"
    return "training state and engines fit side by side; the reference is resident only while it scores"
