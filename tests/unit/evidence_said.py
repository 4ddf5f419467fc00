"""What the processes of the small run of evidence_builder say: weights by fingerprint, and a manifest that agrees."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from rlk.evidence import layout
from rlk.evidence.partition import rows_key
from rlk.evidence.plans import derived_record, topology_record
from rlk.evidence.program import parameters
from rlk.evidence.schemas import (
    GREEDY_CONVENTION,
    KL_CONVENTION,
    EngineReadback,
    Fingerprints,
    Kernel,
    Memory,
    Partitioned,
    Process,
    Readback,
    Repository,
    Requested,
    TrainReadback,
    Update,
)
from rlk.evidence.settings import requested_engine, requested_train
from rlk.evidence.tensors import expected_tensors
from rlk.plan.derive import Plan

KERNELS = {"gemm": "loop", "attention": "loop"}


def make_update(plan: Plan, number: int) -> Update:
    names = list(parameters(plan.shape.layers, tied=plan.shape.tie_word_embeddings))

    def hashes(kind: str) -> dict[str, str]:
        words = {name: hashlib.sha256(f"{kind} {name} {number}".encode()).hexdigest() for name in names}
        return {name: f"{word[:16]}:{word[16:32]}" for name, word in words.items()}

    fields = {kind: hashes(kind) for kind in ("gradients", "masters", "first_moments", "second_moments")}
    return Update(step=number, replicas_agree=True, **fields)


def make_fingerprints(plan: Plan, version: int) -> Fingerprints:
    """One-dimensional tensors stay, the others change with every version."""
    tensors = expected_tensors(plan.shape)
    hashes = {}
    for entry in tensors:
        text = f"{entry.name} {version if len(entry.shape) > 1 else 0}"
        word = hashlib.sha256(text.encode()).hexdigest()
        hashes[entry.name] = f"{word[:16]}:{word[16:32]}"
    engines = tuple(dict(hashes) for _ in range(plan.engines))
    return Fingerprints(version=version, tensors=tensors, trainer=hashes, trainer_replicas_agree=True, engines=engines)


def _partitioned(plan: Plan, rank: int, rows: int = 40) -> Partitioned:
    """Two prefill steps of 40 rows together, evenly over the context-parallel ranks; none without any."""
    cp, n = plan.rollout.cp, rows // plan.rollout.cp
    if cp == 1:
        return Partitioned(steps=0, rows=0, own_rows=0, own_key=0)
    first = rank // plan.rollout.tp * n
    return Partitioned(steps=2, rows=rows, own_rows=n, own_key=rows_key(0, [range(first, first + n)]))


def manifest_fields(plan: Plan, roles: tuple[str, ...]) -> dict[str, Any]:
    pids = {role: 100 + number for number, role in enumerate(roles)}
    train = tuple(
        TrainReadback(
            pid=pids[layout.train_role(rank)],
            kernels=KERNELS,
            gpu=None,
            holdings=(),
            freed_bytes=0,
            **requested_train(plan, rank),
        )
        for rank in range(plan.ranks)
    )
    engines = tuple(
        tuple(
            EngineReadback(
                pid=pids[layout.engine_role(engine, rank)],
                kernels=KERNELS,
                gpu=None,
                partitioned=_partitioned(plan, rank),
                **requested_engine(plan, engine, rank),
            )
            for rank in range(plan.engine_ranks)
        )
        for engine in range(plan.engines)
    )
    return {
        "run_id": plan.run_id,
        "command": plan.config.command,
        "arguments": ("verify",),
        "mode": plan.config.mode,
        "created": "2026-01-01T00:00:00Z",
        "status": "complete",
        "error": None,
        "requested": {name: Requested(**one) for name, one in plan.requested().items()},
        "effective": plan.effective(),
        "topology": topology_record(plan),
        "derived": derived_record(plan),
        "profile": plan.profile.name,
        "kernels": tuple(Kernel(name=name, form=form, proof="fixed loop order") for name, form in KERNELS.items()),
        "versions": {"numpy": np.__version__},
        "repository": Repository(revision=None, dirty=True, patch_sha256=None),
        "runtime": {},
        "memory": Memory(offload=plan.offload, reason="the training state fits beside the engines"),
        "kl_convention": KL_CONVENTION,
        "greedy_convention": GREEDY_CONVENTION,
        "readback": Readback(train=train, engines=engines),
        "processes": tuple(Process(pid=pid, started=1.0, role=role) for role, pid in pids.items()),
        "actors_outlive_run": False,
        "notes": (),
    }
