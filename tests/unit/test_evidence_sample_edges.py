"""Both sides of every edge in the checks of samples and tokens: just inside is green, just outside is red, each way
round; and where several things are wrong, the first is named and all are counted.

Made for mutants of the checks: each case is one that a change of a comparison, a constant or an index would turn over.
"""

from __future__ import annotations

import numpy as np

from rlk.evidence.arrays import LENGTH, STOP
from rlk.evidence.checks.logprobs import mismatching
from tests.unit.evidence_builder import Change, Draft, complete, make_draft
from tests.unit.evidence_faults import everywhere, on_sample, on_token, then
from tests.unit.evidence_memory import Case, assert_said, cases, step_of
from tests.unit.evidence_steps import EOS


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


def _other_replicas(draft: Draft) -> None:
    """TP rank 1 says other log-probs than TP rank 0: tp_replicas is what sees it."""
    for columns in draft.steps[0].trains[2:]:
        columns["logprob"] = columns["logprob"] - np.float32(3)
        columns["update_logprob"] = columns["update_logprob"] - np.float32(3)


def _shift(draft: Draft) -> None:
    for columns in draft.steps[0].trains:
        columns["logprob"] = columns["logprob"] + np.float32(np.log(0.8))


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
    Case("responses", "cut_with_an_end_that_is_ignored", None, _response(0, 5, EOS, reason=LENGTH),
         options={"lengths": (6, 6, 6, 6), "ignore_eos": True}),
    Case("responses", "stopped_at_an_end_that_is_ignored", r"sample 1: stopped, but .* stand at \[\] of 3",
         options={"ignore_eos": True}),
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
    Case("logprobs_positive", "first_of_two", r"sample 0 token 1 \(id \d+\): rollout 0\.5 0x3f000000 is above zero \[",
         then(on_token(0, 0, 1, **everywhere(0.5)), on_token(0, 3, 1, **everywhere(0.25)))),
    Case("logprobs_policy", "renormalised_by_top_k", r"only that side normalised over the kept tokens",
         lambda draft: _shift(draft), options={"mix": None, "temperature": 1.0, "top_k": 1}),
    Case("logprobs_policy", "full_support_is_no_such_cause", r"^(?!.*normalised)", lambda draft: _shift(draft),
         options={"mix": None, "temperature": 1.0}),
]  # fmt: skip


@cases([*COVERAGE, *LOGPROBS])
def test_edge_is_where_the_rule_says(case: Case) -> None:
    assert_said(case)


def test_tokens_are_compared_with_the_first_replica() -> None:
    draft = complete(make_draft(), _other_replicas)
    assert mismatching(step_of(draft, 0)) == (18, 0)
