"""Probe files in plain numpy: a word that depends on op, sample, position and shard, and so is equal wherever a row is.

`recordings` gives what all ranks of a small run recorded in one step; tests change single words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlk.evidence.layout import engine_role, train_role
from rlk.evidence.probe import Probe
from rlk.evidence.program import STATES, parameters, program, replicated
from rlk.plan.derive import Plan

SHARDS = 8
Keys = list[tuple[int, int]]  # sample, position


def recordings(plan: Plan, prompts: dict[int, int], lengths: dict[int, int]) -> list[Probe]:
    """Every rank's probe; prompt and whole length by sample id. Engines take samples in turn, CP ranks positions."""
    found = []
    for rank in range(plan.ranks):
        tp, cp = divmod(rank, plan.train.cp)
        keys = [(s, p) for s, n in lengths.items() for p in range(n) if p % plan.train.cp == cp]
        phases = ("score", "update", "backward")
        arrays = dict(_phases(plan, phases, keys, prompts, lengths, tp, plan.train.tp))
        arrays |= dict(_optimizer(plan, rank))
        found.append(Probe(train_role(rank), tp * SHARDS // plan.train.tp, cp * SHARDS // plan.train.cp, arrays))
    for engine in range(plan.engines):
        own = [s for s in lengths if s % plan.engines == engine]
        keys = [(s, p) for s in own for p in range(lengths[s] - 1)]
        for rank in range(plan.engine_ranks):
            arrays = dict(_phases(plan, ("rollout",), keys, prompts, lengths, rank, plan.rollout.tp))
            found.append(Probe(engine_role(engine, rank), rank * SHARDS // plan.rollout.tp, 0, arrays))
    return found


def _phases(
    plan: Plan,
    phases: tuple[str, ...],
    keys: Keys,
    prompts: dict[int, int],
    lengths: dict[int, int],
    tp: int,
    size: int,
) -> Iterator[tuple[str, np.ndarray]]:
    head = [(s, p) for s, p in keys if prompts[s] - 1 <= p < lengths[s] - 1]
    shards = range(tp * SHARDS // size, (tp + 1) * SHARDS // size)
    for phase in phases:
        for name, rows in (("", keys), ("head_", head)):
            yield f"{phase}/{name}sample", np.array([s for s, _ in rows], np.int64)
            yield f"{phase}/{name}position", np.array([p for _, p in rows], np.int64)
        for number, op in enumerate(program(phase, plan.shape.layers)):
            columns = shards if op.sharded else (0,)
            yield f"{phase}/{op.name}", _words(number, head if op.head else keys, list(columns))


def _words(op: int, keys: Keys, shards: list[int]) -> np.ndarray:
    plain = [[((op * 997 + s) * 997 + p) * 997 + shard for shard in shards] for s, p in keys]
    return np.array(plain, np.uint64).reshape(len(keys), len(shards)) * np.uint64(0x9E3779B97F4A7C15)


def _optimizer(plan: Plan, rank: int) -> Iterator[tuple[str, np.ndarray]]:
    tp, cp = divmod(rank, plan.train.cp)
    pieces = np.arange(SHARDS // plan.train.cp) + cp * SHARDS // plan.train.cp
    for state in STATES:
        for number, name in enumerate(parameters(plan.shape.layers, tied=plan.shape.tie_word_embeddings)):
            held = 1 if replicated(name) else SHARDS // plan.train.tp
            shards = np.arange(held) + (0 if replicated(name) else tp * held)
            yield f"optimizer/{state}/{name}", (number * 997 + shards[:, None] * 8 + pieces).astype(np.uint64)


def flip(probes: list[Probe], role: str, array: str, row: int = 0, column: int = 0) -> None:
    """Another word in one place of one rank."""
    arrays: dict[str, Any] = {probe.role: probe.arrays for probe in probes}[role]
    arrays[array] = arrays[array].copy()
    arrays[array][row, column] ^= np.uint64(1)
