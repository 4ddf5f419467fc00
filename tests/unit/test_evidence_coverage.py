"""Coverage checks: a sample or token that is missing, doubled, foreign or altered is found, and named.

Where it can be, a fault is put on every file that could notice (engines, train ranks, batch, and the metrics that are
counted from them), so that it is red because of coverage and not because two files disagree.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlk.evidence.arrays import LENGTH
from rlk.evidence.schemas import Generated
from tests.unit.evidence_builder import Draft, build
from tests.unit.evidence_faults import (
    READ_SAMPLES,
    READ_SCORED,
    Fault,
    assert_caught,
    drop_sample,
    keep_rows,
    on_metrics,
    on_sample,
    on_token,
    parameters,
    then,
)
from tests.unit.evidence_steps import EOS


def _sample_gone_everywhere(draft: Draft) -> None:
    step = draft.steps[1]
    drop_sample(step.rollouts[0], 0)  # sample 6
    keep_rows(step.batch, step.batch["sample_id"] != 6)
    for columns in step.trains:
        keep_rows(columns, columns["sample_id"] != 6)


def _sample_generated_twice(draft: Draft) -> None:
    step = draft.steps[0]
    for name, column in step.rollouts[1].items():
        step.rollouts[1][name] = np.concatenate([column, step.rollouts[0][name]])


def _sample_renamed_everywhere(draft: Draft) -> None:
    step = draft.steps[0]
    for columns in (*step.rollouts, *step.trains, step.batch):
        columns["sample_id"][columns["sample_id"] == 3] = 11


def _row_gone(draft: Draft) -> None:
    for rank in (1, 3):
        columns = draft.steps[0].trains[rank]
        keep_rows(columns, np.arange(1, len(columns["index"])))


def _row_in_both_shards(draft: Draft) -> None:
    trains = draft.steps[0].trains
    for rank in (0, 2):
        for name, column in trains[rank].items():
            trains[rank][name] = np.concatenate([column, trains[rank + 1][name][:1]])


def _labels_rolled(draft: Draft) -> None:
    for rank in (0, 2):
        columns = draft.steps[1].trains[rank]
        columns["token"] = np.roll(columns["token"], 1)


def _one_logprob_short(draft: Draft) -> None:
    columns = draft.steps[0].rollouts[1]
    columns["logprobs"] = columns["logprobs"][:-1]


def _one_reference_short(draft: Draft) -> None:
    columns = draft.steps[0].trains[3]
    columns["ref_logprob"] = columns["ref_logprob"][:-1]


def _long_prompts(draft: Draft) -> None:
    # Samples 2 and 3, one in each engine and first there, get the same two tokens more.
    for columns in draft.steps[0].rollouts:
        columns["prompt_tokens"] = np.concatenate([np.array([5, 5], np.int32), columns["prompt_tokens"]])
        columns["prompt_len"][0] += 2


def _empty_response(draft: Draft) -> None:
    step = draft.steps[0]
    for columns in step.rollouts:
        for row in np.flatnonzero(columns["sample_id"] == 1):
            start = int(columns["response_len"][:row].sum())
            gone = np.arange(start, start + columns["response_len"][row])
            for name in ("tokens", "mask", "logprobs"):
                columns[name] = np.delete(columns[name], gone)
            columns["response_len"][row] = 0
    for columns in step.trains:
        keep_rows(columns, columns["sample_id"] != 1)


FAULTS = [
    Fault(
        "seven_ids_with_six_logprobs",
        {"lengths"} | READ_SAMPLES,
        r"lengths: step 0: rollout-01: logprobs has 7 entries, 8 are needed",
        after=_one_logprob_short,
    ),
    Fault(
        "one_reference_value_short",
        {"lengths", "tp_replicas"} | READ_SCORED - {"logprobs_zero_tail"},
        r"lengths: step 0: train-03: ref_logprob has \d+ entries, \d+ are needed",
        after=_one_reference_short,
    ),
    Fault(
        "a_sample_gone_everywhere",
        {"sample_coverage"},
        r"step 1 sample 6: missing in the engines",
        before=_sample_gone_everywhere,
    ),
    Fault(
        "a_sample_from_two_engines",
        {"sample_coverage"},
        r"step 0 sample 0: there more than once in the engines",
        before=_sample_generated_twice,
    ),
    Fault(
        "a_sample_id_of_another_step",
        {"sample_coverage"},
        r"step 0 sample 3: missing in the engines",
        before=_sample_renamed_everywhere,
    ),
    Fault(
        "a_sample_without_reward",
        {"sample_coverage"},
        r"step 0 sample 1: missing in the batch",
        before=lambda draft: keep_rows(draft.steps[0].batch, np.array([0, 2, 3])),
    ),
    Fault(
        "a_token_that_no_shard_scored",
        {"token_coverage"},
        r"step 0 sample 3 token 1: missing on TP rank 0",
        before=_row_gone,
    ),
    Fault(
        "a_token_that_two_shards_scored",
        {"token_coverage"},
        r"step 0 sample 3 token 1: there more than once on TP rank 0",
        before=_row_in_both_shards,
    ),
    Fault(
        "labels_rolled_inside_a_shard",
        {"token_coverage"},
        r"step 1 sample \d token \d \(id \d+\): TP rank 0 scored id \d+, the engine sampled id \d+",
        before=_labels_rolled,
    ),
    Fault(
        "an_engine_that_counted_more_tokens",
        {"generated_counts"},
        r"step 1 engine 0: generated tokens is 99, expected 10",
        after=on_metrics(
            1,
            generated=(
                Generated(samples=2, tokens=99, chunks=1, cached_tokens=0, preemptions=0),
                Generated(samples=2, tokens=8, chunks=1, cached_tokens=0, preemptions=0),
            ),
        ),
    ),
    Fault(
        "an_engine_that_counted_nothing",
        {"generated_counts"},
        r"step 1 engines: number is 0, expected 2",
        after=on_metrics(1, generated=()),
    ),
    Fault(
        "a_padding_id_sampled",
        {"token_ids"},
        r"step 0 \(id 40\): response token outside the real vocabulary of 40 ids",
        before=on_token(0, 2, 1, tokens=40, token=40),
    ),
    Fault(
        "a_negative_id_in_a_prompt",
        {"token_ids", "prompts"},
        r"step 0 \(id -1\): prompt token outside",
        before=lambda draft: draft.steps[0].rollouts[0]["prompt_tokens"].__setitem__(0, -1),
    ),
    Fault(
        "a_token_masked_out",
        {"token_ids"},
        r"step 1 sample 5 token 2 \(id 1\): mask is 0, expected 1",
        before=on_token(1, 5, 2, mask=0),
    ),
    Fault(
        "a_prompt_of_another_group",
        {"prompts"},
        r"step 0 sample 3: has another prompt than sample 2 of its group",
        before=on_sample(0, 3, prompt_index=7),
    ),
    Fault(
        "a_prompt_longer_than_the_profile_allows",
        {"prompts"},
        r"step 0 sample 2: has 5 prompt tokens, 1 to 4 are allowed",
        before=_long_prompts,
    ),
    Fault(
        "more_cached_than_the_prompt_has",
        {"prompts"},
        r"step 1 sample 4: 3 prompt tokens were cached, the prompt has 2",
        before=on_sample(1, 4, cached_tokens=3),
    ),
    Fault(
        "a_stop_that_says_length",
        {"responses"},
        r"step 0 sample 1: ended by length at 3 of 6 tokens, with end-of-sequence ids at \[2\]",
        before=on_sample(0, 1, finish_reason=LENGTH),
    ),
    Fault(
        "an_end_in_the_middle",
        {"responses"},
        r"step 1 sample 7: stopped, but end-of-sequence ids stand at \[1, 4\] of 5 tokens",
        before=on_token(1, 7, 1, tokens=EOS, token=EOS),
    ),
    Fault(
        "a_finish_reason_nobody_knows",
        {"responses"},
        r"step 1 sample 7: finish_reason is 2",
        before=on_sample(1, 7, finish_reason=2),
    ),
    Fault(
        "a_response_without_tokens",
        {"responses"},
        r"step 0 sample 1: has 0 response tokens, 1 to 6 are allowed",
        before=_empty_response,
    ),
]


@parameters(FAULTS)
def test_each_fault_reddens_only_its_checks(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


def test_rows_may_stand_in_any_order(tmp_path: Path) -> None:
    def shuffle(draft: Draft) -> None:
        for step in draft.steps:
            for columns in step.trains[:2]:
                order = np.random.default_rng(3).permutation(len(columns["index"]))
                keep_rows(columns, order)
            for cp_rank in (0, 1):
                step.trains[2 + cp_rank] = {name: column.copy() for name, column in step.trains[cp_rank].items()}

    _, validation = build(tmp_path, before=shuffle)
    assert validation.passed


def test_an_empty_shard_is_complete_when_the_other_has_all(tmp_path: Path) -> None:
    def gather(draft: Draft) -> None:
        for trains in (step.trains for step in draft.steps):
            for first in (0, 2):
                for name in trains[first]:
                    trains[first][name] = np.concatenate([trains[first][name], trains[first + 1][name]])
                    trains[first + 1][name] = trains[first + 1][name][:0]

    _, validation = build(tmp_path, before=gather)
    assert validation.passed


def test_all_counted_tokens_are_compared_in_every_step(tmp_path: Path) -> None:
    _, validation = build(tmp_path, before=then())
    assert validation.check("token_coverage").count == 2 * validation.tokens_compared
    assert validation.check("sample_coverage").count == 8
