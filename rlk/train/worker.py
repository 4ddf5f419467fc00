"""What one trainer rank does in a step: score, score with the reference, update, export. No Ray here: see
rlk.train.rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlk.kernels import policy
from rlk.kernels.collectives.connect import settle
from rlk.kernels.policy import RowParams
from rlk.model import checkpoint
from rlk.model.faults import ops_for, policy_for
from rlk.model.native import NativeOps
from rlk.model.ops import Ops
from rlk.model.parallel import ParallelContext
from rlk.model.policy import Policy
from rlk.model.policy_probe import ProbedPolicy
from rlk.model.probe import ProbedOps, Recorder
from rlk.model.qwen3 import Qwen3
from rlk.plan.derive import Plan
from rlk.train.batching import MicroBatch, Sample, build, micro_batches
from rlk.train.faults import train_fault
from rlk.train.gradients import Accumulators, piece_fingerprints
from rlk.train.memory import Residence, State, held_bytes
from rlk.train.optimizer import AdamSettings, Optimizer, UpdateReport
from rlk.train.policy import CanonicalArm, NativeArm
from rlk.train.probe import recorded, recorded_update


@dataclass(frozen=True)
class ScoredTokens:
    """This rank's response tokens, one entry each: sample id i64, place in the response i32, token i32,
    log-probability f32, in the support u8."""

    sample_id: npt.NDArray[np.int64]
    index: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    in_support: npt.NDArray[np.uint8]


class TrainWorker:
    """Model, optimizer and batch of one rank."""

    def __init__(self, plan: Plan, context: ParallelContext) -> None:
        self.plan, self.context = plan, context
        self.device = torch.device(plan.profile.device)
        inject, rank = plan.config.inject, context.tp.rank * context.cp.size + context.cp.rank
        native, keep = plan.config.mode == "native", plan.config.probe_row
        self.recorder = Recorder(context, plan.shape.layers, native=native, keep=keep) if plan.config.probe else None
        rules: Policy = ProbedPolicy(policy, self.recorder, plan.config.seed) if self.recorder else policy
        rules, policy_moment = policy_for(inject, "train", "both", inner=rules)
        canonical, ops_moment = ops_for(inject, "train", "both")
        self.fault = train_fault(inject, rank)
        self.moments = [m for m in (ops_moment, policy_moment, self.fault and self.fault.when) if m]
        self.arm = NativeArm() if native else CanonicalArm(self.recorder, rules)
        ops: Ops = NativeOps() if native else canonical
        ops = ProbedOps(ops, self.recorder) if self.recorder else ops
        self.model = Qwen3(plan.shape, context, ops, plan.max_model_len, device=self.device)
        self.residence, self.reference_bytes = Residence(self.device), 0
        self.batches: list[MicroBatch] = []
        self.params: list[RowParams] = []
        self.reset()

    def reset(self) -> None:
        """Back to the checkpoint: weights, masters, moments and step count as they were at the start, byte for byte."""
        self.model.load(checkpoint.load(Path(self.plan.profile.model), self.model.params, self.context))
        self.optimizer = Optimizer(self.model.weights, self.context)
        self.sums = Accumulators(self.model.weights, self.context)

    @property
    def state(self) -> State:
        """Everything that outlives a step, by what it is."""
        o = self.optimizer
        return {
            "weights": self.model.weights,
            "masters": o.master,
            "first moments": o.m,
            "second moments": o.v,
            "gradients": self.sums.pieces,
        }

    def offload(self) -> None:
        """Leaves the device to the engines; only `restore` may come next."""
        self.model.forget_prepared()
        self.residence.offload(self.state)

    def restore(self) -> None:
        """Takes the device back."""
        self.residence.restore(self.state)

    def holdings(self) -> tuple[dict[str, Any], ...]:
        """What this rank holds while engines generate."""
        return self.residence.holdings(self.state, self.reference_bytes)

    def begin(self, samples: Sequence[Sample]) -> None:
        """Takes a step's samples, in any order; cuts them in micro-batches and keeps this rank's rows."""
        for moment in self.moments:
            moment.step = self.optimizer.step_count
        ordered = sorted(samples, key=lambda s: s.sample_id)
        groups = micro_batches(ordered, self.plan.logical_budget)
        self.batches = [build(group, self.context).to(self.device) for group in groups]
        if self.fault is not None:
            self.batches = [self.fault.batch(batch) for batch in self.batches]
        settings = [[(s.sampling.temperature, s.sampling.top_p, s.sampling.top_k) for s in g] for g in groups]
        vocab = self.plan.shape.vocab_size
        built = [RowParams.build(s, vocab).to(self.device) for s in settings]
        self.params = [params.rows(batch.owner) for params, batch in zip(built, self.batches, strict=True)]

    def score(self) -> ScoredTokens:
        """The policy's log-probabilities, recomputed."""
        parts = []
        for batch, params in zip(self.batches, self.params, strict=True):
            scored = batch if self.fault is None else self.fault.scoring(batch)
            with recorded(self.recorder, "score", batch):
                parts.append(self.arm.score(self.model, scored, params))
        ids = [torch.tensor([s.sample_id for s in b.samples], device=self.device)[b.owner] for b in self.batches]
        logprobs = self._on_host([logprob for logprob, _ in parts])
        return ScoredTokens(
            self._on_host(ids),
            self._on_host([b.index for b in self.batches]).astype(np.int32),
            self._on_host([b.target for b in self.batches]).astype(np.int32),
            logprobs if self.fault is None else self.fault.scored(logprobs),
            self._on_host([inside for _, inside in parts]).astype(np.uint8),
        )

    def score_reference(self) -> npt.NDArray[np.float32]:
        """Log-probabilities of the reference over the full vocabulary, fp32 [M]; its weights live only as long as
        this call."""
        path = Path(self.plan.profile.reference or self.plan.profile.model)
        reference = Qwen3(self.plan.shape, self.context, self.model.ops, self.plan.max_model_len, device=self.device)
        reference.load(checkpoint.load(path, reference.params, self.context))
        self.reference_bytes = held_bytes(reference.weights)
        rows = zip(self.batches, self.params, strict=True)
        return self._on_host([self.arm.score(reference, b, p.full_support())[0] for b, p in rows])

    def update(
        self, coefficients: Mapping[int, npt.NDArray[np.float32]]
    ) -> tuple[npt.NDArray[np.float32], UpdateReport]:
        """Forward, backward and one optimizer step; coefficients fp32 [R] by sample id.

        Returns the log-probabilities that were differentiated, fp32 [M], and the report. The model then holds the
        new weights.
        """
        self.sums.zero()
        seen = []
        for batch, params in zip(self.batches, self.params, strict=True):
            flat = np.concatenate([coefficients[s.sample_id] for s in batch.samples])
            first = np.cumsum([0] + [s.response_len for s in batch.samples])
            place = torch.from_numpy(first).to(self.device)[batch.owner] + batch.index
            rows = torch.from_numpy(flat).to(self.device)[place]
            with recorded(self.recorder, "update", batch):
                seen.append(self.arm.accumulate(self.model, batch, params, rows, self.sums))
        gradients, settings = self.sums.gradients(), self._settings()
        if self.fault is not None:
            self.fault.gradients(gradients)
            settings = self.fault.settings(settings)
        with recorded_update(self.recorder, self.optimizer, gradients):
            report = self.optimizer.step(gradients, settings)
        weights = self.optimizer.export(self.model.weights)
        self.model.load(weights if self.fault is None else self.fault.exports(weights))
        return self._on_host(seen), report

    def _on_host(self, parts: Sequence[torch.Tensor]) -> npt.NDArray[Any]:
        """Where a rank's results leave its device: every log-probability that becomes evidence passes here."""
        settle(self.context.tp, self.context.cp)
        return torch.cat(list(parts)).cpu().numpy()

    def _settings(self) -> AdamSettings:
        c = self.plan.config
        return AdamSettings(c.lr, (c.adam_beta1, c.adam_beta2), c.adam_eps, c.weight_decay, c.max_grad_norm)

    def update_fingerprints(self) -> dict[str, dict[str, tuple[int, int]]]:
        """This rank's part of the fingerprints of the last update, by the fields of rlk.evidence.schemas.Update."""
        pieces = {
            "gradients": self.sums.gradients(),
            "masters": self.optimizer.master,
            "first_moments": self.optimizer.m,
            "second_moments": self.optimizer.v,
        }
        return {field: piece_fingerprints(values, self.context) for field, values in pieces.items()}

    def take_probe(self) -> tuple[int, int, dict[str, npt.NDArray[Any]]]:
        """First virtual shard and piece held here, and what was recorded since the last call; empty without a probe."""
        taken = self.recorder.take() if self.recorder else {}
        return self.context.shards.start, self.context.slices.start, taken

    def described(self) -> list[tuple[str, int, str]]:
        """See rlk.model.checkpoint.described."""
        return checkpoint.described(self.model.params, self.model.weights, self.context)

    def fingerprints(self) -> dict[str, tuple[int, int]]:
        """This rank's part of the fingerprint of every exported tensor."""
        return checkpoint.fingerprints(self.model.params, self.model.weights, self.context)
