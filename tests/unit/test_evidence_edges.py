"""Both sides of every edge in the checks of a step: just inside is green, just outside is red, each way round; and
where several things are wrong, the first is named and all are counted.

Made for mutants of the checks: each case is one that a change of a comparison, a constant or an index would turn over.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlk.evidence.arrays import LENGTH, STOP
from rlk.evidence.checks.logprobs import mismatching
from rlk.evidence.checks.metrics import training_notes
from rlk.evidence.checks.probe import located
from rlk.evidence.errors import EvidenceError
from rlk.evidence.oracle import tolerance
from rlk.evidence.probe import Probe
from rlk.evidence.schemas import Metrics, Readback
from tests.unit.evidence_builder import Change, Draft, complete, make_draft
from tests.unit.evidence_faults import everywhere, on_metrics, on_sample, on_token, then
from tests.unit.evidence_memory import Case, assert_said, cases, held, step_of
from tests.unit.evidence_steps import EOS
from tests.unit.probe_builder import flip


def _prompt(samples: tuple[int, ...], tokens: int) -> Change:
    """Prompts of that many tokens for samples of step 0."""

    def change(draft: Draft) -> None:
        for columns in draft.steps[0].rollouts:
            ends = np.cumsum(columns["prompt_len"])
            own = np.split(columns["prompt_tokens"], ends[:-1])
            for row in np.flatnonzero(np.isin(columns["sample_id"], samples)):
                own[row], columns["prompt_len"][row] = np.full(tokens, 7, np.int32), tokens
            columns["prompt_tokens"] = np.concatenate(own)

    return change


def _in_batch(sample: int) -> Change:
    """One more row in the batch of step 0."""

    def change(draft: Draft) -> None:
        batch = draft.steps[0].batch
        for name in batch:
            batch[name] = np.concatenate([batch[name], batch[name][:1]])
        batch["sample_id"][-1] = sample

    return change


def _response(sample: int, *tokens: int, reason: int) -> Change:
    """The first tokens of a response of step 0, and why it ended."""
    put = [on_token(0, sample, at, tokens=token, token=token) for at, token in enumerate(tokens)]
    return then(*put, on_sample(0, sample, finish_reason=reason))


def _replica(rank: int, by: float) -> Change:
    """The first reference log-prob of a rank of step 0, moved."""

    def change(draft: Draft) -> None:
        draft.steps[0].trains[rank]["ref_logprob"][0] += np.float32(by)

    return change


def _zeros(sample: int, *at: int) -> Change:
    return then(*(on_token(0, sample, index, **everywhere(0.0)) for index in at))


def _oracle_moved(by: float) -> Change:
    """The oracle says another log-probability of the first token that it looked at in step 0."""

    def change(draft: Draft) -> None:
        for name in ("logprob", "least", "most"):
            draft.steps[0].oracle[name][0] += by

    return change


def _keys_that_wrap(draft: Draft) -> None:
    """Keys of one tensor-parallel place whose sum passes 2^64."""
    said: Readback = draft.manifest["readback"]
    (first, second, third, last), *others = said.engines
    total = (second.partitioned.own_key + last.partitioned.own_key) % 2**64
    moved = [
        one.model_copy(update={"partitioned": one.partitioned.model_copy(update={"own_key": key})})
        for one, key in ((second, 2**64 - 1), (last, (total + 1) % 2**64))
    ]
    engines = ((first, moved[0], third, moved[1]), *others)
    draft.manifest["readback"] = said.model_copy(update={"engines": engines})


def _no_rows(draft: Draft) -> None:
    """A rank that saw the steps and computed nothing of them."""
    said: Readback = draft.manifest["readback"]
    (first, *rest), *others = said.engines
    none = first.partitioned.model_copy(update={"own_rows": 0})
    engines = ((first.model_copy(update={"partitioned": none}), *rest), *others)
    draft.manifest["readback"] = said.model_copy(update={"engines": engines})


NUCLEUS = {"mix": None, "temperature": 0.7, "top_p": 0.9}
COVERAGE = [
    Case("token_coverage", "scored_above", r"TP rank 0 scored id 6, the engine sampled id 5",
         on_token(0, 2, 1, tokens=5, token=6)),
    Case("token_coverage", "scored_below", r"TP rank 0 scored id 4, the engine sampled id 5",
         on_token(0, 2, 1, tokens=5, token=4)),
    Case("token_coverage", "first_of_two", r"sample 2 token 1 \(id 5\): TP rank 0 scored id 6, .* id 5 \[4 of 36 ",
         then(on_token(0, 2, 1, tokens=5, token=6), on_token(0, 2, 2, tokens=8, token=9))),
    Case("sample_coverage", "one_too_many", r"sample 99: there but not expected in the batch \[1 of 4 ", _in_batch(99)),
    Case("token_ids", "lowest", None, on_token(0, 2, 1, tokens=0)),
    Case("token_ids", "highest", None, on_token(0, 2, 1, tokens=39)),
    Case("token_ids", "below", r"\(id -1\): response token outside", on_token(0, 2, 1, tokens=-1)),
    Case("token_ids", "above", r"\(id 40\): response token outside", on_token(0, 2, 1, tokens=40)),
    Case("token_ids", "far_above", r"\(id 41\): response token outside", on_token(0, 2, 1, tokens=41)),
    Case("token_ids", "first_of_two", r"\(id 50\): response token .*\[2 of",
         then(on_token(0, 2, 1, tokens=50), on_token(0, 2, 2, tokens=60))),
    Case("token_ids", "mask_above", r"mask is 2, expected 1", on_token(0, 2, 1, mask=2)),
    Case("token_ids", "first_of_two_masks", r"sample 1 token 2 .*mask is 0, expected 1 \[2 of",
         then(on_token(0, 2, 1, mask=0), on_token(0, 1, 2, mask=0))),
    Case("prompts", "shortest", None, _prompt((0, 1), 1)),
    Case("prompts", "longest", None, _prompt((0, 1), 4)),
    Case("prompts", "empty", r"sample 0: has 0 prompt tokens, 1 to 4", _prompt((0, 1), 0)),
    Case("prompts", "too_long", r"sample 0: has 5 prompt tokens, 1 to 4", _prompt((0, 1), 5)),
    Case("prompts", "lower_index", r"sample 1: has another prompt than sample 0", on_sample(0, 1, prompt_index=-1)),
    Case("prompts", "higher_index", r"sample 1: has another prompt than sample 0", on_sample(0, 1, prompt_index=9)),
    Case("prompts", "other_tokens", r"sample 1: has another prompt than sample 0", _prompt((1,), 2)),
    Case("prompts", "cached_less_than_none", r"-1 prompt tokens were cached", on_sample(0, 0, cached_tokens=-1)),
    Case("prompts", "cached_some", None, on_sample(0, 0, cached_tokens=1)),
    Case("prompts", "cached_all", None, on_sample(0, 0, cached_tokens=2)),
    Case("prompts", "cached_more", r"3 prompt tokens were cached, the prompt has 2", on_sample(0, 0, cached_tokens=3)),
    Case("responses", "shortest", None, options={"lengths": (1, 3, 4, 5)}),
    Case("responses", "longest", None, options={"lengths": (6, 6, 6, 6)}),
    Case("responses", "too_long", r"has 7 response tokens, 1 to 6", options={"lengths": (7, 3, 4, 5)}),
    Case("responses", "stopped_without_an_end", r"sample 1: stopped, but .* stand at \[\] of 3",
         _response(1, 5, 5, 5, reason=STOP)),
    Case("responses", "stopped_before_the_last", r"sample 1: stopped, but .* stand at \[1\] of 3",
         _response(1, 5, EOS, 5, reason=STOP)),
    Case("responses", "stopped_twice", r"sample 1: stopped, but .* stand at \[0, 2\] of 3",
         _response(1, EOS, 5, EOS, reason=STOP)),
    Case("responses", "cut_before_the_limit", r"sample 1: ended by length at 3 of 6 tokens",
         _response(1, 5, 5, 5, reason=LENGTH)),
    Case("responses", "cut_with_an_end", r"sample 0: ended by length at 6 of 6 tokens, with .* at \[1\]",
         _response(0, 5, EOS, reason=LENGTH)),
]  # fmt: skip
LOGPROBS = [
    Case("logprobs_zero_tail", "at_the_temperature", r"sample 0 token 4: the last 2 log-probs", _zeros(0, 4, 5),
         options={"mix": None, "temperature": 0.7}),
    Case("logprobs_zero_tail", "below_the_temperature", None, _zeros(0, 4, 5),
         options={"mix": None, "temperature": 0.69}),
    Case("logprobs_zero_tail", "above_the_temperature", r"the last 2", _zeros(0, 4, 5),
         options={"mix": None, "temperature": 1.5}),
    Case("logprobs_zero_tail", "one_zero", None, _zeros(2, 3)),
    Case("logprobs_zero_tail", "not_at_the_end", None, _zeros(2, 1, 2)),
    Case("logprobs_zero_tail", "three_zeros", r"sample 2 token 1: the last 3 log-probs", _zeros(2, 1, 2, 3)),
    Case("logprobs_zero_tail", "nothing_else", r"sample 2 token 0: the last 4 log-probs", _zeros(2, 0, 1, 2, 3)),
    Case("logprobs_zero_tail", "nucleus", None, _zeros(0, 4, 5), options=NUCLEUS),
    Case("logprobs_zero_tail", "top_k", None, _zeros(0, 4, 5), options={"mix": None, "temperature": 1.0, "top_k": 9}),
    Case("logprobs_zero_tail", "top_k_of_one", None, _zeros(0, 4, 5),
         options={"mix": None, "temperature": 1.0, "top_k": 1}),
    Case("support", "no_flag", r"sample 1 token 2 .*outside the support of TP rank 0 \[2 of 36",
         on_token(0, 1, 2, in_support=2)),
    Case("support", "first_of_two", r"sample 1 token 2 .*outside the support of TP rank 0 \[4 of 36",
         then(on_token(0, 3, 0, in_support=0), on_token(0, 1, 2, in_support=0))),
    Case("tp_replicas", "higher", r"ref_logprob: TP ranks 0 and 1 of CP rank 0 differ", _replica(2, 0.5)),
    Case("tp_replicas", "lower", r"ref_logprob: TP ranks 0 and 1 of CP rank 1 differ", _replica(3, -0.5)),
    Case("logprobs_policy", "is_that_of_the_first_replica", None, lambda draft: _other_replicas(draft)),
    Case("logprobs_update", "is_that_of_the_first_replica", None, lambda draft: _other_replicas(draft)),
    Case("oracle", "reachable_is_no_flag", r"outside the support that the oracle allows",
         after=lambda draft: draft.steps[0].oracle["reachable"].__setitem__(0, 2)),
    Case("oracle", "above", r"rollout -?\d\S+, the oracle says \S+, allowed -\S+ to -", after=_oracle_moved(-0.5)),
    Case("oracle", "below", r"rollout -?\d\S+, the oracle says \S+, allowed -?\S+ to ", after=_oracle_moved(0.5)),
    Case("oracle", "is_that_of_the_first_replica", None, lambda draft: _other_replicas(draft)),
    Case("logprobs_positive", "first_of_two", r"sample 0 token 1 \(id \d+\): rollout 0\.5 0x3f000000 is above zero \[",
         then(on_token(0, 0, 1, **everywhere(0.5)), on_token(0, 3, 1, **everywhere(0.25)))),
    Case("logprobs_policy", "renormalised_by_top_k", r"only that side normalised over the kept tokens",
         lambda draft: _shift(draft), options={"mix": None, "temperature": 1.0, "top_k": 1}),
    Case("logprobs_policy", "full_support_is_no_such_cause", r"^(?!.*normalised)", lambda draft: _shift(draft),
         options={"mix": None, "temperature": 1.0}),
]  # fmt: skip


def _kernels(draft: Draft, times: int) -> None:
    draft.manifest["kernels"] = draft.manifest["kernels"] * times


SHARED = {"rollout_tp": 2, "rollout_cp": 2}
THREE = {"mix": "0.7/0.95,0,1.3"}  # settings of a batch of four: its second step starts with the first of them again
METRICS = [
    Case("sampling_settings", "mix_that_does_not_divide_the_batch", None, step=1, options=THREE),
    Case("oracle", "mix_that_does_not_divide_the_batch", None, step=1, options=THREE),
    Case("kernels", "named_twice", r"kernels must name each choice once", lambda draft: _kernels(draft, 2)),
    Case("kernels", "none", r"kernels must name each choice once", lambda draft: _kernels(draft, 0)),
    Case("query_partition", "sum_of_keys_wraps", None, _keys_that_wrap, options=SHARED),
    Case("query_partition", "no_row_of_some_steps", r"0 rows of [1-9]\d* shared steps: it took no part", _no_rows,
         options=SHARED),
    Case("metrics_finite", "infinite", r"step 0: kl is inf, expected a finite", after=on_metrics(0, kl=float("inf"))),
    Case("metrics_finite", "minus_infinite", r"step 0: kl is -inf", after=on_metrics(0, kl=-float("inf"))),
    Case("metrics_finite", "nan", r"step 0: kl is nan", after=on_metrics(0, kl=float("nan"))),
    Case("metrics_finite", "negative", None, after=on_metrics(0, kl=-1e300)),
    Case("two_steps", "three", None, options={"steps": 3}),
    Case("two_steps", "one", r"1 steps, a verify needs 2", options={"steps": 1, "command": "run"}),
    Case("learning_rate", "negative", r"step 1: learning rate is -1", after=on_metrics(1, lr=-1.0)),
    Case("learning_rate", "zero", r"step 1: learning rate is 0", after=on_metrics(1, lr=0.0)),
    Case("gradient_nonzero", "negative", r"zero gradient, grad_norm is -1", after=on_metrics(1, grad_norm=-1.0)),
]  # fmt: skip


def _other_replicas(draft: Draft) -> None:
    """TP rank 1 says other log-probs than TP rank 0: tp_replicas is what sees it."""
    for columns in draft.steps[0].trains[2:]:
        columns["logprob"] = columns["logprob"] - np.float32(3)
        columns["update_logprob"] = columns["update_logprob"] - np.float32(3)


def _shift(draft: Draft) -> None:
    for columns in draft.steps[0].trains:
        columns["logprob"] = columns["logprob"] + np.float32(np.log(0.8))


@cases([*COVERAGE, *LOGPROBS, *METRICS])
def test_edge_is_where_the_rule_says(case: Case) -> None:
    assert_said(case)


def test_tokens_are_compared_with_the_first_replica() -> None:
    draft = complete(make_draft(), _other_replicas)
    assert mismatching(step_of(draft, 0)) == (18, 0)


def test_wrong_sampling_shows_both_sides() -> None:
    failure = assert_said(
        Case("sampling_settings", "sides", "top_k is 5, the plan asks for -1", on_sample(1, 4, top_k=5), step=1)
    ).failure
    assert failure is not None
    assert failure.left is not None
    assert failure.right is not None
    assert (failure.left.source, failure.left.value) == ("rollout", "5")
    assert (failure.right.source, failure.right.value) == ("plan", "-1")


def test_green_oracle_says_how_near_the_nearest_miss_was() -> None:
    def near(draft: Draft) -> None:
        said = draft.steps[0].oracle
        allowed = tolerance(1.0, float(said["least"][0]), float(said["temperature"][0]))
        said["most"][0] = said["logprob"][0] - 0.8 * allowed

    result = assert_said(Case("oracle", "near", None, after=near))
    assert result.message.endswith("step 0: the largest deviation is 80 % of what is allowed")


def test_failed_oracle_shows_both_sides() -> None:
    failure = assert_said(Case("oracle", "sides", "allowed", after=_oracle_moved(-0.5))).failure
    assert failure is not None
    assert failure.left is not None
    assert failure.right is not None
    assert (failure.left.source, failure.right.source) == ("rollout", "oracle")
    assert failure.left.word is not None


def test_place_that_a_probe_cannot_tell_is_said() -> None:
    draft = complete(make_draft(probe=True))
    step, run = step_of(draft, 0), held(draft)

    def missing() -> tuple[Probe, ...]:
        raise EvidenceError("probe-train-00: missing")

    assert located(run, replace(step, probes=missing)) == "the probe cannot tell where: probe-train-00: missing"
    assert located(run, step) == (
        "every recorded op agrees, the log-probability included: the difference came after it was computed"
    )
    assert located(held(complete(make_draft())), step) is None


@pytest.mark.parametrize("op", ["logits", "layers.0.qkv"])
def test_place_of_every_row_is_that_of_the_token_that_it_predicts(op: str) -> None:
    probe = next(p for p in complete(make_draft(probe=True)).probes[1] if p.role == "engine-01-01")
    head = "head_" if op == "logits" else ""
    rows = zip(
        probe.arrays[f"rollout/{head}sample"].tolist(), probe.arrays[f"rollout/{head}position"].tolist(), strict=True
    )
    seen = set()
    for row, (sample, position) in enumerate(rows):
        case = Case("probe", "row", op, lambda d, row=row: flip(d.probes[1], probe.role, f"rollout/{op}", row), step=1,
                    options={"probe": True})  # fmt: skip
        failure = assert_said(case).failure
        assert failure is not None
        index = position + 1 - {5: 2, 7: 3}[sample]
        assert (failure.sample, failure.token_index) == (sample, index if index >= 0 else None)
        seen.add(failure.token_index)
    assert ({None} <= seen) == (op != "logits")
    assert {0, 1, 2, 3, 4} <= seen


def _line(**values: object) -> Metrics:
    return complete(make_draft()).metrics[0].model_copy(update=values)


@pytest.mark.parametrize(
    ("values", "notes"),
    [
        ({"truncated_share": 0.0, "nonzero_advantages": 4, "grad_norm": 1.0}, []),
        ({"truncated_share": 0.25, "nonzero_advantages": 4, "grad_norm": 1.0}, ["25 % of the responses"]),
        ({"truncated_share": 0.0, "nonzero_advantages": 0, "grad_norm": 1e-9}, ["from the KL term alone"]),
        ({"truncated_share": 0.0, "nonzero_advantages": 0, "grad_norm": 0.0}, []),
        ({"truncated_share": 0.0, "nonzero_advantages": 0, "grad_norm": -1.0}, []),
    ],
)
def test_notes_beside_a_green_verdict(values: dict[str, object], notes: list[str]) -> None:
    found = list(training_notes((_line(**values),)))
    assert len(found) == len(notes)
    assert all(note in sentence for note, sentence in zip(notes, found, strict=True))
