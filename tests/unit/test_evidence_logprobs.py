"""Every check on log-probabilities goes red for its own reason and for no other.

A fault is put on both TP replicas, so that only the check it is meant for can see it; faults that byte equality
cannot see (the same NaN on both sides) are put on both sides alike. Sample 2 has temperature 1 and the full support,
sample 0 a nucleus, sample 1 is greedy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlk.evidence import bits
from tests.unit.evidence_builder import Draft, build
from tests.unit.evidence_faults import Fault, assert_caught, everywhere, on_token, one_ulp, parameters, then

FAULTS = [
    Fault(
        "one_ulp_in_the_policy",
        {"logprobs_policy"},
        r"step 1 sample 7 token 0 \(id \d+\): rollout -0\.\d+ 0xb[0-9a-f]{7}, policy -0\.\d+ 0xb[0-9a-f]{7}",
        before=then(one_ulp(1, 0, "logprob"), one_ulp(1, 2, "logprob")),
    ),
    Fault(
        "one_ulp_in_the_update",
        {"logprobs_update"},
        r"step 0 sample 3 token 1 .* update -0",
        before=then(one_ulp(0, 1, "update_logprob"), one_ulp(0, 3, "update_logprob")),
    ),
    Fault(
        "a_rollout_value_padded_with_zero",
        {"logprobs_policy", "logprobs_update"},
        r"step 0 sample 1 token 2 .*rollout 0\.0 0x00000000",
        before=on_token(0, 1, 2, logprobs=np.float32(0)),
    ),
    Fault(
        "zero_against_negative_zero",
        {"logprobs_policy", "logprobs_negative_zero"},
        r"rollout 0\.0 0x00000000, policy -0\.0 0x80000000",
        before=then(on_token(0, 1, 0, **everywhere(0.0)), on_token(0, 1, 0, logprob=np.float32(-0.0))),
    ),
    Fault(
        "the_same_nan_on_both_sides",
        {"logprobs_nan", "oracle"},
        r"step 1 sample 6 token 3 .* rollout nan 0x7fc00000 is a NaN",
        before=on_token(1, 6, 3, **everywhere(np.nan)),
    ),
    Fault(
        "the_same_infinity_on_both_sides",
        {"logprobs_inf", "oracle"},
        r"step 1 sample 6 token 0 .* rollout -inf 0xff800000 is infinite",
        before=on_token(1, 6, 0, **everywhere(-np.inf)),
    ),
    Fault(
        "an_infinite_reference",
        {"logprobs_inf"},
        r"step 1 sample 6 token 0 .* reference of TP rank 0 -inf 0xff800000 is infinite",
        before=on_token(1, 6, 0, ref_logprob=np.float32(-np.inf)),
    ),
    Fault(
        "above_zero_on_both_sides",
        {"logprobs_positive"},
        r"step 0 sample 0 token 5 .* rollout 1e-45 0x00000001 is above zero",
        before=on_token(0, 0, 5, **everywhere(1e-45)),
    ),
    Fault(
        "negative_zero_on_both_sides",
        {"logprobs_negative_zero"},
        r"step 0 sample 3 token 4 .* rollout -0\.0 0x80000000 is a negative zero",
        before=on_token(0, 3, 4, **everywhere(-0.0)),
    ),
    Fault(
        "a_nan_in_the_reference",
        {"logprobs_nan"},
        r"reference of TP rank 0 nan",
        before=on_token(0, 3, 1, ref_logprob=np.float32(np.nan)),
    ),
    Fault(
        "a_tail_of_zeros_with_the_full_support",
        {"logprobs_zero_tail"},
        r"step 0 sample 2 token 2: the last 2 log-probs are exactly 0 at temperature 1\.0",
        before=then(on_token(0, 2, 2, **everywhere(0.0)), on_token(0, 2, 3, **everywhere(0.0))),
    ),
    Fault(
        "a_token_outside_the_support",
        {"support"},
        r"step 1 sample 4 token 5 \(id \d+\): outside the support of TP rank 0",
        before=on_token(1, 4, 5, in_support=0),
    ),
    Fault(
        "replicas_with_different_references",
        {"tp_replicas"},
        r"step 0: ref_logprob: TP ranks 0 and 1 of CP rank 1 differ",
        before=one_ulp(0, 3, "ref_logprob"),
    ),
]


@parameters(FAULTS)
def test_each_fault_reddens_only_its_checks(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


def test_first_mismatch_is_named_with_both_words(tmp_path: Path) -> None:
    _, validation = build(tmp_path, before=on_token(1, 5, 2, logprobs=np.float32(-0.5)))
    failure = validation.check("logprobs_policy").failure
    assert failure is not None
    assert (failure.step, failure.sample, failure.token_index, failure.token_id) == (1, 5, 2, 1)
    assert failure.left is not None
    assert failure.right is not None
    assert (failure.left.source, failure.left.value, failure.left.word) == ("rollout", "-0.5", "0xbf000000")
    assert failure.right.word == bits.hex_word(np.float32(failure.right.value))


def test_tokens_are_counted_once_and_mismatches_united(tmp_path: Path) -> None:
    # One token differs in both forwards, one in the update alone: two tokens, not three.
    change = then(
        on_token(0, 1, 0, logprobs=np.float32(-0.5)),
        on_token(1, 6, 1, update_logprob=np.float32(-0.5)),
    )
    _, validation = build(tmp_path, before=change)
    assert (validation.tokens_compared, validation.mismatching_tokens) == (36, 2)
    assert validation.check("logprobs_policy").failures == 1
    assert validation.check("logprobs_update").failures == 2


def test_zero_tail_is_allowed_where_the_support_was_cut(tmp_path: Path) -> None:
    change = then(on_token(0, 0, 4, **everywhere(0.0)), on_token(0, 0, 5, **everywhere(0.0)))
    _, validation = build(tmp_path, before=change)
    assert validation.passed


def test_tempered_logprobs_are_named_as_cause(tmp_path: Path) -> None:
    def temper(draft: Draft) -> None:
        for step in draft.steps:
            for columns in step.trains:
                for name in ("logprob", "update_logprob"):
                    columns[name] = columns[name] / np.float32(0.7)

    _, validation = build(tmp_path, before=temper, mix=None, temperature=0.7)
    assert validation.mismatching_tokens == 36
    assert "one side scaled log-probs instead of logits" in validation.check("logprobs_policy").message


def test_renormalised_rollout_is_named_as_cause(tmp_path: Path) -> None:
    def shift(draft: Draft) -> None:
        for step in draft.steps:
            for columns in step.trains:
                for name in ("logprob", "update_logprob"):
                    columns[name] = columns[name] + np.float32(np.log(0.8))

    _, validation = build(tmp_path, before=shift, mix=None, temperature=1.0, top_p=0.75)
    assert "only that side normalised over the kept tokens" in validation.check("logprobs_policy").message
