"""Runs in which every response is cut off, in which none is, in which nothing can be learned, and at a rate of zero.

One session of the smallest topology, one trainer rank and one engine. Four prompts a step out of eight plain sums,
whose answers end within 8 tokens, and eight that ask for worked steps, which take more; the seed decides where in that
file a run begins. The policy samples from a nucleus and the reference does not, so a KL term has a gradient from the
first step on; the temperature is high enough for a nucleus of more than one token, of which alone a gradient can come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rlk.evidence.arrays import LENGTH, STOP
from rlk.plan.cells import Cell
from rlk.plan.config import RunConfig
from rlk.plan.derive import derive
from rlk.plan.profile import load_profile
from rlk.plan.shape import read_shape
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

EACH, LIMIT = 8, 8
KL_ALONE = "all advantages were zero, so the gradient came from the KL term alone"
Runs = Callable[..., CellRun]


def seed_at(place: int) -> int:
    """A seed with which a run begins at this place of the file."""
    return next(seed for seed in count() if random.Random(seed).randrange(2 * EACH) == place)


@pytest.fixture(scope="module")
def run(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A run from a place of the file, of two steps unless said; other options as said."""
    profile = load_profile("tiny-cpu", ROOT)
    lines = Path(profile.prompts).read_text(encoding="utf-8").splitlines()
    worked = [line for line in lines if "Show the steps" in line]
    plain = [line for line in lines if line not in worked]
    prompts = tmp_path_factory.mktemp("prompts") / "sums.jsonl"
    prompts.write_text("\n".join(plain[:EACH] + worked[:EACH]) + "\n", encoding="utf-8")
    profile = profile.model_copy(update={"prompts": str(prompts), "ranks": 1, "prompts_per_step": EACH // 2})
    shape = read_shape(Path(profile.model))

    def make(place: int, **changes: Any) -> CellRun:
        options = {"temperature": 1.3, "top_p": 0.95, "max_response_len": LIMIT, "lr": 1e-4, **changes}
        plan = derive(RunConfig(**options, seed=seed_at(place)), profile, shape)
        return sessions.run(
            Cell(id=plan.cell, sentence="Made by a test of edges.", config=options, timeout_s=300), plan
        )

    yield make
    sessions.stop()


@pytest.fixture(scope="module")
def complete(run: Runs) -> CellRun:
    """The plain sums."""
    return run(0)


@pytest.fixture(scope="module")
def cut(run: Runs) -> CellRun:
    """The worked ones."""
    return run(EACH)


@pytest.fixture(scope="module")
def cut_without_kl(run: Runs) -> CellRun:
    """The worked ones, and nothing in the loss but rewards."""
    return run(EACH, kl_coef=0.0)


@pytest.fixture(scope="module", params=[0.0, 1e-3], ids=["rate0", "rate1e-3"])
def around(request: pytest.FixtureRequest, run: Runs) -> tuple[float, CellRun]:
    """A learning rate, and a greedy run that comes back to its first prompts in its last step."""
    steps = 2 * EACH // (EACH // 2) + 1
    return request.param, run(0, command="run", temperature=0.0, top_p=1.0, lr=request.param, steps=steps)


def reasons(run: CellRun) -> set[int]:
    return {reason for step in (0, 1) for reason in run.record.step(step).samples.finish_reason.tolist()}


def test_run_without_a_truncated_response_passes(complete: CellRun) -> None:
    assert reasons(complete) == {STOP}
    assert complete.outcome.errors == ()
    assert all(metrics.nonzero_advantages > 0 for metrics in complete.record.metrics)
    assert not any("truncated" in note or KL_ALONE in note for note in complete.verdict.notes)


def test_run_of_truncated_responses_passes_by_kl_alone_and_says_so(cut: CellRun) -> None:
    assert reasons(cut) == {LENGTH}
    assert cut.outcome.errors == ()
    for metrics in cut.record.metrics:
        assert (metrics.nonzero_advantages, metrics.reward_std) == (0, 0)
        assert metrics.grad_norm > 0
        assert f"step {metrics.step}: 100 % of the responses were truncated" in cut.verdict.notes
        assert f"step {metrics.step}: {KL_ALONE}" in cut.verdict.notes


def test_equal_rewards_without_kl_are_red_by_the_gradient(cut_without_kl: CellRun) -> None:
    """The twin: the same prompts and samples, and no KL term."""
    assert [metrics.grad_norm for metrics in cut_without_kl.record.metrics] == [0, 0]
    assert not cut_without_kl.outcome.passed
    red = {check.name for check in cut_without_kl.verdict.checks if not check.passed}
    assert "gradient_nonzero" in red
    assert red <= {"gradient_nonzero", "weights_changed"}, "for no other reason"
    assert cut_without_kl.verdict.check("gradient_nonzero").message.count("zero gradient") > 0


def test_kl_is_all_that_the_two_differ_in(cut: CellRun, cut_without_kl: CellRun) -> None:
    first, other = (one.record.step(0).samples for one in (cut, cut_without_kl))
    assert first.tokens.tobytes() == other.tokens.tobytes()
    assert first.logprobs.tobytes() == other.logprobs.tobytes()


def test_bytes_come_back_with_the_prompts_only_where_no_weight_moved(around: tuple[float, CellRun]) -> None:
    """At a rate of zero a step still trains, exports, sends and loads: none of that may change a bit. Its twin is a
    rate that moves weights."""
    rate, run = around
    assert run.outcome.errors == ()
    first, last = (run.record.step(step).samples for step in (0, run.plan.config.steps - 1))
    assert first.prompt_tokens.tobytes() == last.prompt_tokens.tobytes()
    assert set(last.weight_version.tolist()) == {run.plan.config.steps - 1}, "as many updates were loaded"
    assert all(metrics.grad_norm > 0 for metrics in run.record.metrics if metrics.nonzero_advantages)
    weights = [version.trainer for version in run.record.fingerprints]
    assert (weights[0] == weights[-1]) == (rate == 0)
    assert (first.logprobs.tobytes() == last.logprobs.tobytes()) == (rate == 0)
