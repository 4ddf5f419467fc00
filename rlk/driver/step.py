"""One training step: rollout, reward, scores, loss, update, weight sync, and the evidence of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlk.driver.errors import RunError
from rlk.driver.faults import sync_fault
from rlk.driver.groups import Engines, Trainer
from rlk.driver.oracle import Oracle, apart
from rlk.driver.progress import Watch
from rlk.driver.sync import fingerprint_record, recut, tensor_entries, update_record
from rlk.evidence.arrays import BatchArrays, RolloutArrays, TrainArrays
from rlk.evidence.counts import batch_counts
from rlk.evidence.digest import Made
from rlk.evidence.probe import Probe
from rlk.evidence.samples import Samples, merge
from rlk.evidence.schemas import Fingerprints, Generated, Metrics, Seconds
from rlk.evidence.writer import RunWriter
from rlk.plan.derive import Plan
from rlk.rollout.messages import Generation, Request
from rlk.train.batching import Sample
from rlk.train.data import Prompt, PromptSet
from rlk.train.loss import TokenLogprobs, advantages, grpo
from rlk.train.worker import ScoredTokens

Scores = list[tuple[ScoredTokens, npt.NDArray[np.float32]]]


@dataclass
class Stopwatch:
    """Seconds by phase."""

    seconds: dict[str, float]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class StepRunner:
    """Runs the steps of one run, in order from 0."""

    def __init__(
        self,
        plan: Plan,
        trainer: Trainer,
        engines: Engines,
        data: PromptSet,
        oracle: Oracle,
        writer: RunWriter,
        watch: Watch,
    ) -> None:
        self.plan, self.trainer, self.engines = plan, trainer, engines
        self.data, self.oracle, self.writer, self.watch = data, oracle, writer, watch
        self.fault = sync_fault(plan.config.inject)
        self.aside = apart()

    def initial_weights(self) -> None:
        """Fingerprints of version 0, which both sides read from the same checkpoint.

        Names, shapes and dtypes are asked here only: weights are written in place, and `Qwen3.load` refuses others.
        """
        self.tensors = tensor_entries(self.plan, self.trainer.described())
        self.writer.fingerprints(self._fingerprints(0))
        self.exports = self.trainer.export()

    def run(self, step: int) -> None:
        """One step; weights of version `step` in, version `step + 1` out."""
        clock, start = Stopwatch({}), time.perf_counter()
        prompts, loading = self._prompts(step), self.aside.submit(self.oracle.load, self.exports)
        self.exports = []  # the largest things in Ray's memory: gone once the oracle has read them
        with clock.phase("rollout"):
            self.watch.phase(step, "rollout")
            if self.plan.offload:
                self.trainer.offload()
            rollouts, generated, agree = self._rollout(step, prompts)
            if self.plan.offload:
                self.trainer.restore()
        samples = merge(rollouts)
        self.watch.tokens(len(samples.tokens))
        batch = self._rewards(step, samples, prompts)
        loading.result()
        looking = self.aside.submit(self.oracle.look, step, samples)
        with clock.phase("score"):
            self.watch.phase(step, "score")
            train_samples = list(_train_samples(self.plan, step, samples))
            scores = self.trainer.score(train_samples)
        loss = grpo(
            self._logprobs(samples, scores),
            dict(zip(batch.sample_id.tolist(), batch.advantage.tolist(), strict=True)),
            clip_eps=self.plan.config.clip_eps,
            kl_coef=self.plan.config.kl_coef,
        )
        with clock.phase("train"):
            self.watch.phase(step, "train")
            updates = self.trainer.update(loss.coefficients)
        self._write_train(step, scores, [logprob for logprob, _ in updates])
        self.writer.oracle(step, self.oracle.weights, looking.result())
        with clock.phase("sync"):
            self.watch.phase(step, "sync")
            self.exports = self.trainer.export()
            if self.fault is not None:
                self.fault.when.step = step
            self.engines.load(recut(self.exports, self.plan.rollout.tp), step + 1, self.fault)
            weights = self._fingerprints(step + 1)
        self.writer.fingerprints(weights)
        made = Made(update_record(self.plan, step, self.trainer.update_fingerprints()), weights, self.plan.config.seed)
        self.writer.update(made.update)
        self.writer.trajectory(step, rollouts, batch, made)
        self._write_probe(step)
        seconds = Seconds(**clock.seconds, total=time.perf_counter() - start)
        report, counts = updates[0][1], batch_counts(samples, batch)
        self.writer.metrics(
            Metrics(
                step=step,
                loss=loss.loss,
                policy_loss=loss.policy_loss,
                kl=loss.kl,
                clip_fraction=loss.clip_fraction,
                grad_norm=report.grad_norm,
                clip_factor=report.clip_factor,
                lr=self.plan.config.lr,
                weight_version=step,
                rollout_logprobs_reused=self.plan.config.use_rollout_logprobs,
                generated=generated,
                engine_ranks_agree=agree,
                seconds=seconds,
                **vars(counts),
            )
        )

    def _prompts(self, step: int) -> list[Prompt]:
        """The prompt of every sample of the step, in sample order."""
        prompts = self.data.batch(step, self.plan.prompts_per_step, self.plan.config.seed)
        return [prompt for prompt in prompts for _ in range(self.plan.samples_per_prompt)]

    def _rollout(
        self, step: int, prompts: Sequence[Prompt]
    ) -> tuple[list[RolloutArrays], tuple[Generated, ...], tuple[bool, ...]]:
        n, engines = len(prompts), self.plan.engines
        requests: list[list[Request]] = [[] for _ in range(engines)]
        for i, prompt in enumerate(prompts):  # neighbours share an engine, and so a prompt's samples its prefix cache
            sampling, limit = self.plan.sampling_of(i), self.plan.config.max_response_len
            request = Request(step * n + i, prompt.index, list(prompt.tokens), sampling, limit)
            requests[i * engines // n].append(request)
        before = self.engines.counters()
        generations = self.engines.generate(step, requests, step)
        after = self.engines.counters()
        for engine, ranks in enumerate(generations):
            self.writer.rollout(step, engine, ranks[0].arrays)
        agree = tuple(_agree(ranks) for ranks in generations)
        return [ranks[0].arrays for ranks in generations], tuple(map(_generated, before, after)), agree

    def _rewards(self, step: int, samples: Samples, prompts: Sequence[Prompt]) -> BatchArrays:
        first = step * len(prompts)
        expected = list(range(first, first + len(prompts)))
        if samples.sample_id.tolist() != expected:
            raise RunError(
                f"step {step}: the engines returned samples {samples.sample_id.tolist()}, expected {expected}"
            )
        rewards = [
            self.data.reward(prompt, tokens) for prompt, (_, tokens) in zip(prompts, _sequences(samples), strict=True)
        ]
        gain = advantages(rewards, self.plan.baseline, self.plan.samples_per_prompt)
        batch = BatchArrays(samples.sample_id, np.array(rewards), np.array(gain))
        self.writer.batch(step, batch)
        return batch

    def _logprobs(self, samples: Samples, scores: Scores) -> dict[int, TokenLogprobs]:
        """What the loss reads, by sample, from the context-parallel ranks of tensor-parallel rank 0."""
        lengths = dict(zip(samples.sample_id.tolist(), samples.response_len.tolist(), strict=True))
        now, ref = ({i: np.full(n, np.nan, np.float32) for i, n in lengths.items()} for _ in range(2))
        for scored, reference in scores[: self.plan.train.cp]:
            rows = zip(scored.sample_id.tolist(), scored.index.tolist(), scored.logprob, reference, strict=True)
            for sample, index, logprob, reference_logprob in rows:
                now[sample][index], ref[sample][index] = logprob, reference_logprob
        lost = [i for i in now if np.isnan(now[i]).any() or np.isnan(ref[i]).any()]
        if lost:
            raise RunError(f"score: samples {lost} have tokens without a log-probability, or NaN")
        old = now
        if self.plan.config.use_rollout_logprobs:
            ends = np.cumsum(samples.response_len)
            old = {i: samples.logprobs[end - lengths[i] : end] for i, end in zip(lengths, ends.tolist(), strict=True)}
        return {i: TokenLogprobs(old[i], now[i], ref[i]) for i in now}

    def _write_train(self, step: int, scores: Scores, updated: Sequence[npt.NDArray[np.float32]]) -> None:
        cp = self.plan.train.cp
        for rank, ((s, reference), update) in enumerate(zip(scores, updated, strict=True)):
            arrays = TrainArrays(s.sample_id, s.index, s.token, s.logprob, update, reference, s.in_support)
            self.writer.train(step, *divmod(rank, cp), cp, arrays)

    def _write_probe(self, step: int) -> None:
        if self.plan.config.probe:
            for role, recorded in (self.trainer.take_probe() | self.engines.take_probe()).items():
                self.writer.probe(step, Probe(role, *recorded))

    def _fingerprints(self, version: int) -> Fingerprints:
        return fingerprint_record(
            self.plan, version, self.tensors, self.trainer.fingerprints(), self.engines.fingerprints()
        )


def _sequences(samples: Samples) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and response of every sample, in sample order."""
    prompts = np.split(samples.prompt_tokens, np.cumsum(samples.prompt_len)[:-1])
    responses = np.split(samples.tokens, np.cumsum(samples.response_len)[:-1])
    for prompt, response in zip(prompts, responses, strict=True):
        yield prompt.tolist(), response.tolist()


def _train_samples(plan: Plan, step: int, samples: Samples) -> Iterator[Sample]:
    first = step * plan.samples_per_step
    for sample, (prompt, response) in zip(samples.sample_id.tolist(), _sequences(samples), strict=True):
        yield Sample(sample, (*prompt, *response), len(prompt), plan.sampling_of(sample - first))


def _agree(ranks: Sequence[Generation]) -> bool:
    """Every rank of an engine returned the same bytes."""
    return len({generation.digest for generation in ranks}) == 1


def _generated(before: dict[str, int], after: dict[str, int]) -> Generated:
    def spent(name: str) -> int:
        return after[name] - before[name]

    return Generated(
        samples=spent("generated_samples"),
        tokens=spent("generated_tokens"),
        chunks=spent("chunks"),
        cached_tokens=spent("cached_tokens"),
        preemptions=spent("preemptions"),
        graph_replays=spent("graph_replays"),
    )
