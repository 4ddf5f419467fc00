"""Faults that can be injected on purpose: what each does, where it acts, and which checks must catch it. Data only.

A check that cannot fail shows nothing. So every fault of this list is applied in a test, and the run that applies them
writes docs/faults.md. Where a fault acts decides who applies it:

| acts in | applied by |
|---|---|
| ops, policy | rlk/model/faults.py, in the operators and the sampler of one side or of both |
| batch, update | rlk/train/faults.py, in what a train rank is given to compute and in its optimizer step |
| sync, cache | rlk/driver/faults.py and one engine's ranks, between training and the next rollout |
| pages | rlk/rollout/faults.py, in one engine's cache of keys and values |
| record | rlk/driver/record_faults.py, on the finished run directory before it is judged |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Acts = Literal["ops", "policy", "batch", "update", "sync", "cache", "pages", "record"]
Side = Literal["rollout", "train", "both"]
Proof = Literal["one process", "live engines", "recorded run"]
POLICY = ("logprobs_policy", "logprobs_update")


@dataclass(frozen=True)
class Fault:
    """One fault. `rollout` faults act in engine 0 alone. `caught_by` names checks of which all must be red; `proof` is
    where the test applies it."""

    name: str
    sentence: str
    acts: Acts
    side: Side
    caught_by: tuple[str, ...]
    proof: Proof


def _ops(name: str, sentence: str, side: Side = "rollout", *caught_by: str) -> Fault:
    return Fault(name, sentence, "ops", side, caught_by or POLICY, "one process")


def _policy(name: str, sentence: str, side: Side = "rollout", *caught_by: str) -> Fault:
    return Fault(name, sentence, "policy", side, caught_by or POLICY, "one process")


def _sync(name: str, sentence: str) -> Fault:
    return Fault(name, sentence, "sync", "rollout", ("weights_equal",), "live engines")


def _record(name: str, sentence: str, *caught_by: str) -> Fault:
    return Fault(name, sentence, "record", "both", caught_by, "recorded run")


FAULTS: tuple[Fault, ...] = (
    _ops("ranks-swapped", "the logits of two tensor-parallel ranks change places"),
    _ops("logit-ulp", "the lowest bit of the largest logit of each row is flipped"),
    _ops("shard-dropped", "one virtual shard is left out of every tree of partial sums"),
    _ops("left-to-right", "partial sums are added from left to right instead of by the tree"),
    _ops("partials-bf16", "partial sums are rounded to bf16 before they travel"),
    _ops("split-k", "column-parallel products sum two halves of K and add them, as split-K kernels do"),
    _ops("rope-bf16", "the RoPE tables are rounded to bf16"),
    _ops("rope-base", "RoPE uses the base 10,000 instead of the checkpoint's"),
    _ops("no-q-norm", "the norm of the queries is left out"),
    _ops("rope-base-both", "RoPE uses the base 10,000, in both engines alike", "both", "oracle"),
    _ops("no-q-norm-both", "the norm of the queries is left out, in both engines alike", "both", "oracle"),
    _policy("temperature-twice", "logits are divided by the temperature a second time"),
    _policy("padded-columns", "the padding of the vocabulary enters the softmax with logits of zero"),
    _policy("temperature-on-logprobs", "log-probabilities instead of logits are divided by the temperature"),
    _policy("raw-logprobs", "the engine returns log-probabilities at T = 1 over the full vocabulary"),
    _policy("no-truncation", "top-p and top-k are ignored on one side", "train"),
    _policy("top-p-first", "the nucleus is cut before top-k instead of after it"),
    _policy("ties-kept", "top-k keeps every token that ties with the k-th"),
    _policy("wrong-key", "the generator's key is the seed plus one", "rollout", "oracle"),
    _policy("temperature-twice-both", "the temperature is applied twice, in both engines alike", "both", "oracle"),
    _policy("padded-columns-both", "padding enters the softmax, in both engines alike", "both", "oracle"),
    _policy("no-truncation-both", "top-p and top-k are ignored, in both engines alike", "both", "oracle"),
    Fault("cp-layout", "shards of a sequence are rejoined in rank order", "batch", "train", POLICY, "one process"),
    Fault("labels-rolled", "labels are rolled inside a shard", "batch", "train", ("token_coverage",), "one process"),
    Fault("packing-ignored", "packed samples see each other's keys", "batch", "train", POLICY[:1],
          "one process"),
    Fault("pages-reused", "a request that was preempted does not write a page again that others used meanwhile",
          "pages", "rollout", POLICY, "live engines"),
    Fault("gradient-twice", "one rank's part of the gradient counts twice", "update", "train", ("optimizer_states",),
          "one process"),
    Fault("gradient-zeroed", "the gradient is set to zero", "update", "train", ("gradient_nonzero",), "live engines"),
    Fault("lr-zero", "the optimizer takes a learning rate of zero", "update", "train", ("weights_changed",),
          "live engines"),
    Fault("master-not-exported", "masters move, the weights that both sides compute with do not", "update", "train",
          ("weights_changed",), "live engines"),
    Fault("nan-on-one-rank", "one train rank returns a NaN", "update", "train", ("status",), "live engines"),
    _sync("stale-weights", "engine 0 keeps its old weights"),
    _sync("sync-one-engine", "only engine 0 gets new weights"),
    _sync("sync-without-head", "the head is missing from what engine 0 gets"),
    _sync("sync-without-norm", "the last norm is missing from what engine 0 gets"),
    _sync("sync-without-q-norm", "a q-norm is missing from what engine 0 gets"),
    _sync("sync-without-embedding", "the embedding is missing from what engine 0 gets"),
    Fault("cache-kept", "engine 0 keeps its prefix cache over a weight update", "cache", "rollout", POLICY,
          "live engines"),
    _record("logprobs-reused", "rollout log-probabilities are used in training", "logprob_reuse"),
    _record("sample-dropped", "one sample is missing from an engine's record", "sample_coverage", "generated_counts"),
    _record("logprob-padded", "the last log-probability of a sample is 0.0", "logprobs_policy", "digest"),
    _record("nan-everywhere", "a token's log-probability is a NaN on both sides", "logprobs_nan", "digest"),
    _record("step-skipped", "a step left no line in the metrics", "steps"),
    _record("step-doubled", "a step stands twice in the metrics", "steps"),
    _record("job-failed", "the Ray job failed, and the exit code was 0", "ray"),
)  # fmt: skip

BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True)
class Injection:
    """A fault and the step in which it acts; None is every step."""

    fault: Fault
    step: int | None

    @property
    def sentence(self) -> str:
        """What a reader of the manifest and the verdict must know."""
        when = "every step" if self.step is None else f"step {self.step}"
        return f"fault {self.fault.name} was injected on purpose in {when}: {self.fault.sentence}"

    def acts(self, step: int) -> bool:
        """Whether the fault acts in this step."""
        return self.step in (None, step)


def injection(text: str) -> Injection:
    """Reads NAME or NAME@STEP. Raises KeyError for a name that is not in the list."""
    name, _, step = text.partition("@")
    return Injection(BY_NAME[name], int(step) if step else None)


@dataclass
class Moment:
    """What a fault in some process knows of the time: the owner sets `step`, the fault asks whether it acts."""

    injection: Injection
    step: int = 0

    @property
    def on(self) -> bool:
        """Whether the fault acts now."""
        return self.injection.acts(self.step)


def moment(text: str | None, acts: tuple[Acts, ...], sides: tuple[Side, ...]) -> Moment | None:
    """The moment of the injected fault where it acts in one of these places on one of these sides, else None."""
    if text is None:
        return None
    found = injection(text)
    return Moment(found) if found.fault.acts in acts and found.fault.side in sides else None
