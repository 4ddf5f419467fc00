"""The arrays of one step of the small run of evidence_builder, in plain numpy, free to be changed.

4 samples in 2 groups, which alternate between engines and stand in them in descending order, so that nothing passes
by keeping the order of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlk.evidence.arrays import LENGTH, STOP, RolloutArrays
from rlk.evidence.oracle import looked_at, uniform
from rlk.evidence.samples import Samples, merge
from rlk.plan.derive import Plan

EOS = 1
LENGTHS = (6, 3, 4, 5)  # of responses; 6 is the limit, at which one is cut off


@dataclass
class Step:
    """The arrays of one step as dictionaries of columns, free to be changed. The oracle's follow from the rest."""

    rollouts: list[dict[str, np.ndarray]]
    trains: list[dict[str, np.ndarray]]
    batch: dict[str, np.ndarray]
    oracle: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def samples(self) -> Samples:
        """The samples of all engines, in order."""
        return merge([RolloutArrays(**columns) for columns in self.rollouts])


def make_step(plan: Plan, number: int, lengths: Sequence[int] = LENGTHS) -> Step:
    """Samples of these lengths; the first prompt of a step has 2 tokens, the second 3."""
    random = np.random.default_rng(number)
    ids = np.arange(plan.samples_per_step) + number * plan.samples_per_step
    samples = []
    for index, sample in enumerate(ids.tolist()):
        group = index // plan.samples_per_prompt
        tokens = random.integers(2, plan.shape.vocab_size, lengths[index % len(lengths)]).astype(np.int32)
        cut = len(tokens) == plan.config.max_response_len
        if not cut:
            tokens[-1] = EOS
        sampling = plan.sampling_of(index)
        samples.append(
            {
                "sample_id": np.array([sample], np.int64),
                "prompt_index": np.array([number * plan.prompts_per_step + group], np.int64),
                "prompt_len": np.array([2 + group], np.int32),
                "response_len": np.array([len(tokens)], np.int32),
                "prompt_tokens": np.arange(2 + group, dtype=np.int32) + 10 * group + 2,
                "tokens": tokens,
                "mask": np.ones(len(tokens), np.uint8),
                "logprobs": -random.random(len(tokens)).astype(np.float32) - np.float32(0.01),
                "temperature": np.array([sampling.temperature]),
                "top_p": np.array([sampling.top_p]),
                "top_k": np.array([sampling.top_k], np.int64),
                "finish_reason": np.array([LENGTH if cut else STOP], np.uint8),
                "weight_version": np.array([number], np.int64),
                "cached_tokens": np.array([0], np.int64),
            }
        )
    engines = [samples[engine :: plan.engines][::-1] for engine in range(plan.engines)]
    rollouts = [{name: np.concatenate([one[name] for one in own]) for name in own[0]} for own in engines]
    trains = [_train(samples, rank % plan.train.cp, plan.train.cp, random) for rank in range(plan.train.cp)]
    replicas = [{k: v.copy() for k, v in trains[rank % plan.train.cp].items()} for rank in range(plan.ranks)]
    rewards = np.array([1.0, 0.0, 0.0, 1.0])[: len(ids)]
    batch = {"sample_id": ids.astype(np.int64), "reward": rewards, "advantage": rewards - 0.5}
    return Step(rollouts, replicas, batch)


def _train(
    samples: list[dict[str, np.ndarray]], cp_rank: int, cp: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """The rows of one CP rank: every cp-th token of each sample, last sample first."""
    parts = []
    for sample in reversed(samples):
        index = np.arange(cp_rank, len(sample["tokens"]), cp, dtype=np.int32)
        parts.append(
            {
                "sample_id": np.full(len(index), sample["sample_id"][0]),
                "index": index,
                "token": sample["tokens"][index],
                "logprob": sample["logprobs"][index],
                "update_logprob": sample["logprobs"][index],
                "ref_logprob": -random.random(len(index)).astype(np.float32) - np.float32(0.01),
                "in_support": np.ones(len(index), np.uint8),
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def oracle_columns(plan: Plan, number: int, step: Step) -> dict[str, np.ndarray]:
    """An oracle that says what the rollout says; 12 / 256 * (1 - p) is allowed at T = 1."""
    samples = step.samples
    pairs = looked_at(number, samples.logprobs_by_row(), len(plan.config.samplings))
    rows = np.array([row for row, _ in pairs])
    at = samples.response_start[rows] + np.array([index for _, index in pairs])
    settings = [plan.sampling_of(int(i) - number * plan.samples_per_step) for i in samples.sample_id[rows]]
    positions = samples.prompt_len[rows] + samples.index[at]
    keys = zip(samples.sample_id[rows].tolist(), positions.tolist(), strict=True)
    logprob = samples.logprobs[at].astype(np.float64)
    return {
        "sample_id": samples.sample_id[rows],
        "index": samples.index[at],
        "token": samples.tokens[at].astype(np.int64),
        "temperature": np.array([s.temperature for s in settings]),
        "top_p": np.array([s.top_p for s in settings]),
        "top_k": np.array([s.top_k for s in settings], np.int64),
        "logprob": logprob,
        "least": logprob.copy(),
        "most": logprob.copy(),
        "scale": np.ones(len(rows)),
        "reachable": np.ones(len(rows), np.uint8),
        "below": np.zeros(len(rows)),
        "through": np.ones(len(rows)),
        "draw": np.array([uniform(plan.config.seed, *one) for one in keys]),
    }
