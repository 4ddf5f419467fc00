"""A sample is a function of weights, prompt, settings and key: not of its neighbours, chunks, the cache or preemption.

One real vLLM engine of one rank at a time, twelve prompts of 5 to 117 tokens with five samplings mixed, 24 new tokens.
Budgets: 512 tokens a step takes every prompt whole, 24 none of them; 24 pages are a third of what the sequences fill.
Each equality has a proof that its event happened, and a twin that must fail: ordinary operators, and a cache that
outlives its weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlk.plan.sampling import Sampling
from rlk.rollout.sampling import applied_of
from tests.consistency.engine_cases import Cases, run_cases
from tests.consistency.engines import (
    EOS,
    LEAKED_EOS,
    MIX,
    NATIVE_MIX,
    NEW,
    VOCABULARY,
    in_child,
    make_plan,
    write_checkpoint,
)
from tests.consistency.reference import split, untempered_logprobs

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_checkpoint(folder / "first", 0), write_checkpoint(folder / "second", 1)


@pytest.fixture(scope="module")
def cases(models: tuple[Path, Path]) -> Cases:
    return in_child(run_cases, *models, environment=make_plan(models[0], budget=64).engine_env, timeout_s=300)


@pytest.mark.parametrize("schedule", ["together", "warm", "chunked", "preempted", "same weights again", "after reset"])
def test_schedule_changes_no_byte_anywhere(cases: Cases, schedule: str) -> None:
    assert cases.outcomes[schedule].words == cases.outcomes["alone"].words


def test_every_schedule_had_its_event(cases: Cases) -> None:
    events = {name: outcome.events for name, outcome in cases.outcomes.items()}
    quiet = ("chunks", "cached_tokens", "preemptions")
    assert [events["alone"][name] for name in quiet] == [0, 0, 0]
    assert events["chunked"]["chunks"] >= 12
    assert events["warm"]["cached_tokens"] > events["together"]["cached_tokens"]
    assert events["preempted"]["preemptions"] >= 3
    assert events["together"]["steps"] < events["alone"]["steps"]


def test_native_operators_fail_this_comparison(cases: Cases) -> None:
    assert cases.outcomes["native together"].events["chunks"] > 0
    assert cases.outcomes["native together"].events["sampler_calls"] == 0
    assert cases.outcomes["native together"].words != cases.outcomes["native alone"].words


def test_update_equals_a_fresh_engine(cases: Cases) -> None:
    assert cases.outcomes["updated"].words == cases.outcomes["fresh engine"].words
    assert cases.outcomes["updated"].words != cases.outcomes["alone"].words
    assert cases.outcomes["first after update"].events["cached_tokens"] == 0


def test_cache_of_older_weights_shows(cases: Cases) -> None:
    assert cases.outcomes["stale cache"].events["cached_tokens"] > 0
    assert cases.outcomes["stale cache"].words != cases.outcomes["fresh engine"].words


def test_uncommitted_or_unknown_weights_refuse(cases: Cases) -> None:
    assert "not committed" in cases.refusals["uncommitted"]
    assert cases.refusals["other version"] == "weight version 2 was asked for: this engine holds 1"


@pytest.mark.parametrize("pieces", ["1 pieces", "2 pieces", "35 pieces"])
def test_pieces_of_an_update_add_up(cases: Cases, pieces: str) -> None:
    assert cases.fingerprints[pieces] == cases.fingerprints["start"]


def test_fingerprints_follow_the_live_weights(cases: Cases) -> None:
    start = cases.fingerprints["start"]
    assert all(cases.fingerprints["zeros"][name] != pair for name, pair in start.items())
    assert all(cases.fingerprints["updated"][name] != pair for name, pair in start.items())
    assert cases.fingerprints["updated"] == cases.fingerprints["fresh engine"]
    assert cases.fingerprints["after reset"] == start


def test_another_seed_draws_other_tokens(cases: Cases) -> None:
    assert cases.outcomes["other seed"].words != cases.outcomes["alone"].words


def test_reset_returns_the_random_state(cases: Cases) -> None:
    assert cases.outcomes["native after reset"].words == cases.outcomes["native together"].words


def test_every_kernel_was_proved_there(cases: Cases) -> None:
    assert {"gemm", "tree", "rmsnorm", "attention", "policy"} <= set(cases.readback["worker"]["kernels"])


def test_reset_forgets_every_event(cases: Cases) -> None:
    assert set(cases.after_reset.values()) == {0}


def test_checkpoint_defaults_do_not_leak(cases: Cases) -> None:
    applied = [applied_of(s.temperature, s.top_p, s.top_k, VOCABULARY)._asdict() for s in MIX]
    assert cases.leaking == {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}, "the probe is void"
    assert cases.readback["scheduler"]["default_sampling"] == {}
    assert sorted(cases.readback["sampling"], key=str) == sorted(applied, key=str)


def test_response_ends_where_config_says(cases: Cases) -> None:
    for name, outcome in cases.outcomes.items():
        a = outcome.arrays
        for tokens, reason in zip(split(a.tokens, a.response_len), a.finish_reason, strict=True):
            stops = np.flatnonzero(np.isin(tokens, EOS)).tolist()
            assert stops == ([len(tokens) - 1] if reason == 0 else []), name
            assert reason == 0 or len(tokens) == NEW, name
    reasons, tokens = cases.outcomes["alone"].arrays.finish_reason, cases.outcomes["alone"].arrays.tokens
    assert set(reasons.tolist()) == {0, 1}, "both ways to end must occur"
    assert np.isin(tokens, LEAKED_EOS).any(), "an id of generation_config.json must be passed"


def test_counts_inside_equal_what_returned(cases: Cases) -> None:
    for name, outcome in cases.outcomes.items():
        assert outcome.events["generated_samples"] == len(outcome.arrays.sample_id), name
        assert outcome.events["generated_tokens"] == len(outcome.arrays.tokens), name


def test_greedy_and_random_samples_were_mixed(cases: Cases) -> None:
    for name, mix in (("together", MIX), ("native together", NATIVE_MIX)):
        a = cases.outcomes[name].arrays
        asked = {(s.temperature, s.top_p, s.top_k) for s in mix}
        assert set(zip(a.temperature.tolist(), a.top_p.tolist(), a.top_k.tolist(), strict=True)) == asked


def test_logprobs_agree_with_transformers_model(cases: Cases, models: tuple[Path, Path]) -> None:
    """As near to its fp32 as its own bf16 is, where a log-prob is the untempered one: greedy samples, and T = 1."""
    arrays = cases.outcomes["alone"].arrays
    plain = [i for i in range(12) if MIX[i % len(MIX)] in (Sampling(0.0), Sampling(1.0))]
    ours = torch.from_numpy(np.concatenate([split(arrays.logprobs, arrays.response_len)[i] for i in plain])).double()
    exact, coarse, other = (
        untempered_logprobs(model, arrays, plain, dtype)
        for model, dtype in ((models[0], torch.float32), (models[0], torch.bfloat16), (models[1], torch.float32))
    )
    error, allowed = (ours - exact).abs().mean(), 1.05 * (coarse - exact).abs().mean()
    assert error <= allowed < 0.02
    assert (ours - other).abs().mean() > 1, "weights of another model must not agree"
