"""One trainer's steps on ranks that are threads, put together again: what two topologies must agree on, bit by bit.

The samples' lengths leave most half-slices empty (2), give each one token (16), a remainder (17), three blocks of keys
(130), and ranks that predict nothing (42, of which 2 are the response). Settings mix greedy, nucleus, top-k and none.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rlk.kernels import state
from rlk.model.checkpoint import as_shards, region_view
from rlk.model.layout import Param, parameters
from rlk.model.parallel import ParallelContext
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.sampling import Sampling
from rlk.plan.shape import ModelShape, read_shape
from rlk.train.batching import Sample
from rlk.train.worker import ScoredTokens, TrainWorker
from tests.unit import tiny
from tests.unit.ranks import on_ranks

LENGTHS = ((1, 1), (5, 3), (7, 9), (9, 8), (1, 16), (60, 70), (20, 13), (40, 2))  # prompt, response
MIX = (Sampling(0.7, 0.95), Sampling(1.3, 0.99, 20), Sampling(0.0), Sampling(1.0))
KINDS = ("gradients", "masters", "first_moments", "second_moments", "exports")
Mode = Literal["consistency", "native"]


class Word(NamedTuple):
    """What was said of one response token."""

    token: int
    logprob: bytes
    in_support: int


Words = dict[tuple[int, int], Word]  # by sample id and place in the response


def make_samples(mix: Sequence[Sampling] = MIX, seed: int = 0) -> list[Sample]:
    """Random tokens; ids with gaps, as they are in the second step of a run."""
    rng = random.Random(seed)
    return [
        Sample(3 * i + 40, tuple(rng.randrange(300) for _ in range(p + r)), p, mix[i % len(mix)])
        for i, (p, r) in enumerate(LENGTHS)
    ]


def coefficients(samples: Sequence[Sample]) -> dict[int, npt.NDArray[np.float32]]:
    """Each token's derivative of the loss, fp32 [R] by sample id."""
    return {s.sample_id: np.linspace(-0.1, 0.12, s.response_len).astype(np.float32) for s in samples}


def make_plan(model: Path, mode: Mode = "consistency", budget: int = 1024, **settings: Any) -> Plan:
    """A plan for this checkpoint; its topology does not matter to a worker, whose context says where it is."""
    config = RunConfig(**{"mode": mode, "lr": 1e-3, "max_response_len": 192, **settings})
    plan = derive(config, tiny.profile(model=str(model)), read_shape(str(model)))
    return dataclasses.replace(plan, logical_budget=budget)


@dataclass
class Step:
    """One step of all ranks: log-probabilities, and by kind and parameter whole tensors [shards, 8 pieces, piece]."""

    logprobs: Words
    reference: Words
    seen: Words
    grad_norm: float
    tensors: dict[str, dict[str, torch.Tensor]]
    fingerprints: dict[str, tuple[int, int]]

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return self.tensors["gradients"]


@dataclass
class _Part:
    tp: int
    cp: int
    scored: ScoredTokens
    reference: npt.NDArray[np.float32]
    seen: npt.NDArray[np.float32]
    grad_norm: float
    tensors: dict[str, dict[str, torch.Tensor]]
    fingerprints: dict[str, tuple[int, int]]


def run(plan: Plan, tp: int, cp: int, samples: Sequence[Sample], steps: int = 2) -> list[Step]:
    """`steps` steps of the same samples on tp * cp ranks."""
    coefficient = coefficients(samples)

    def work(context: ParallelContext) -> list[_Part]:
        torch.set_grad_enabled(True)  # per thread; the native arm differentiates
        worker, parts = TrainWorker(plan, context), []
        for _ in range(steps):
            worker.begin(samples)
            scored, reference = worker.score(), worker.score_reference()
            seen, report = worker.update(coefficient)
            o = worker.optimizer
            held = dict(zip(KINDS, (worker.sums.gradients(), o.master, o.m, o.v, worker.model.weights), strict=True))
            tensors = {kind: {n: t.clone() for n, t in whole.items()} for kind, whole in held.items()}
            place = context.tp.rank, context.cp.rank
            parts.append(_Part(*place, scored, reference, seen, report.grad_norm, tensors, worker.fingerprints()))
        return parts

    ranks = on_ranks(tp, cp, work)
    return [_join([parts[step] for parts in ranks], parameters(plan.shape)) for step in range(steps)]


def score(plan: Plan, tp: int, cp: int, samples: Sequence[Sample]) -> Words:
    """Log-probabilities under the checkpoint's own weights, without a step."""

    def work(context: ParallelContext) -> ScoredTokens:
        worker = TrainWorker(plan, context)
        worker.begin(samples)
        return worker.score()

    return _words([(scored, scored.logprob) for scored in on_ranks(tp, cp, work)])


def _join(ranks: list[_Part], params: Sequence[Param]) -> Step:
    whole: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in ranks[0].tensors}
    for kind, out in whole.items():
        for p in params:
            # Replicas must agree: a replicated tensor over TP, an exported one over CP.
            rows: dict[tuple[int, int], torch.Tensor] = {}
            for r in ranks:
                key = (0 if p.replicated else r.tp, 0 if kind == "exports" else r.cp)
                mine = r.tensors[kind][p.name]
                assert torch.equal(rows.setdefault(key, mine), mine), f"{kind} of {p.name}: replicas differ at {key}"
            held = [[as_shards(rows[t, c]) for t, c in sorted(rows) if t == tp] for tp in sorted({t for t, _ in rows})]
            out[p.name] = torch.cat([torch.cat(pieces, 1) for pieces in held])
    assert len({r.grad_norm for r in ranks}) == 1, "every rank has the same norm"
    columns = [r for r in ranks if r.cp == 0]
    prints = {}
    for p in params:
        for tensor in p.tensors:
            parts = [r.fingerprints[tensor.hf_name] for r in (columns[:1] if p.replicated else columns)]
            prints[tensor.hf_name] = state.combine(parts)
    return Step(
        _words([(r.scored, r.scored.logprob) for r in ranks]),
        _words([(r.scored, r.reference) for r in ranks]),
        _words([(r.scored, r.seen) for r in ranks]),
        ranks[0].grad_norm,
        whole,
        prints,
    )


def _words(ranks: Sequence[tuple[ScoredTokens, npt.NDArray[np.float32]]]) -> Words:
    out: Words = {}
    for x, values in ranks:
        for i, value in enumerate(values):
            key = int(x.sample_id[i]), int(x.index[i])
            word = Word(int(x.token[i]), value.tobytes(), int(x.in_support[i]))
            assert out.setdefault(key, word) == word, f"TP replicas differ at {key}"
    return out


def exported(shape: ModelShape, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors by checkpoint name, in the stored type, from pieces or shards of every parameter."""
    out = {t.hf_name: torch.zeros(t.shape, dtype=stored[p.name].dtype) for p in parameters(shape) for t in p.tensors}
    for p in parameters(shape):
        for index, shard in enumerate(stored[p.name].flatten(1)):
            rows = p.shard_shape if len(p.shard_shape) == 2 else (1, p.shard_shape[0])
            held = shard[: rows[0] * rows[1]].view(rows)
            for r in p.regions(index):
                whole = out[r.hf_name].view(-1, out[r.hf_name].shape[-1])
                whole[r.row0 : r.row0 + r.rows, r.col0 : r.col0 + r.cols] = region_view(held, r)
    return out
