"""What an engine rank refuses, with a fake in place of vLLM's engine: nothing is generated on weights nobody named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlk.plan.config import RunConfig
from rlk.plan.derive import derive
from rlk.plan.sampling import Sampling
from rlk.rollout.arguments import rank_environment
from rlk.rollout.engine import EngineRank
from rlk.rollout.messages import Request, RolloutError
from rlk.rollout.sampling import Applied
from tests.unit.tiny import SHAPE, profile
from tests.unit.vllm_modules import with_vllm

REQUEST = Request(3, 0, [7, 8], Sampling(0.7), 16)


class FakeEngine:
    """Answers each request with one token; `applied` is what its sampler says that it used."""

    def __init__(self) -> None:
        self.applied = {3: Applied(0.699999988079071, 1.0, -1)}
        self.cache_is_free, self.is_stuck = True, False
        self.calls: list[str] = []
        self.waiting: list[str] = []

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.waiting.append(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        if self.is_stuck:
            return []
        completion = SimpleNamespace(token_ids=[5], logprobs=SimpleNamespace(logprobs=[-0.5]), finish_reason="length")
        done, self.waiting = self.waiting, []
        return [SimpleNamespace(request_id=i, finished=True, num_cached_tokens=1, outputs=[completion]) for i in done]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return [self.applied if method == "take_applied" else None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.cache_is_free


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> EngineRank:
    with_vllm("sampling")
    plan = derive(RunConfig(max_response_len=64), profile(timeouts={"rollout_s": 1}), SHAPE)
    for name, value in {**plan.engine_env, **rank_environment(0, 1, 29500, "cpu")}.items():
        monkeypatch.setenv(name, value)  # undone after the test, what the rank itself sets included
    made = EngineRank(plan.to_json(), 0, 0, 1, 29500)
    made._live = FakeEngine()
    return made


def test_request_is_answered_when_ready(rank: EngineRank) -> None:
    done = rank.generate(2, [REQUEST], 0)
    assert (done.step, done.arrays.sample_id.tolist(), done.arrays.tokens.tolist()) == (2, [3], [5])


def test_loaded_weights_wait_for_commit(rank: EngineRank) -> None:
    rank.load({})
    with pytest.raises(RolloutError, match="weights were loaded but not committed"):
        rank.generate(0, [REQUEST], 0)
    rank.commit(1)
    assert rank.generate(0, [REQUEST], 1).arrays.weight_version.tolist() == [1]
    assert rank._live.calls[:2] == ["load_stored", "reset_prefix_cache"]


def test_other_versions_are_refused_plainly(rank: EngineRank) -> None:
    with pytest.raises(RolloutError, match="weight version 1 was asked for: this engine holds 0"):
        rank.generate(0, [REQUEST], 1)


def test_kept_cache_fails_the_commit(rank: EngineRank) -> None:
    rank.load({})
    rank._live.cache_is_free = False
    with pytest.raises(RolloutError, match="version 1: vLLM kept its prefix cache"):
        rank.commit(1)
    with pytest.raises(RolloutError, match="not committed"):
        rank.generate(0, [REQUEST], 0)


def test_settings_that_moved_are_refused(rank: EngineRank) -> None:
    rank._live.applied = {3: Applied(0.699999988079071, 0.8, 20)}  # as a checkpoint's defaults would have it
    with pytest.raises(RolloutError, match=r"sample 3: asked for .* the sampler applied"):
        rank.generate(0, [REQUEST], 0)


def test_unsampled_requests_are_refused_too(rank: EngineRank) -> None:
    rank._live.applied = {}
    with pytest.raises(RolloutError, match="the sampler applied None"):
        rank.generate(0, [REQUEST], 0)


def test_sample_ids_come_only_once(rank: EngineRank) -> None:
    with pytest.raises(RolloutError, match="step 4: a sample id comes twice"):
        rank.generate(4, [REQUEST, REQUEST], 0)


def test_endless_generation_names_the_sample(rank: EngineRank) -> None:
    rank._live.is_stuck = True
    with pytest.raises(RolloutError, match="1 samples unfinished after 1 s, the first is 3"):
        rank.generate(0, [REQUEST], 0)


def test_reset_reloads_and_forgets_cache(rank: EngineRank) -> None:
    rank.load({})
    rank.commit(1)
    rank.reset(rank.plan.to_json())
    assert rank._live.calls[-3:] == ["reload", "inject", "reset_prefix_cache"]
    assert rank.generate(0, [REQUEST], 0).arrays.weight_version.tolist() == [0]


@pytest.mark.parametrize("changes", [{"seed": 5}, {"temperature": 0.7}, {"lr": 0.5}])
def test_reset_takes_plans_of_its_engine(rank: EngineRank, changes: dict[str, Any]) -> None:
    plan = derive(rank.plan.config.model_copy(update=changes), rank.plan.profile, SHAPE)
    rank.reset(plan.to_json())
    assert rank.plan == plan


@pytest.mark.parametrize("changes", [{"mode": "native"}, {"rollout_tp": 2}, {"max_response_len": 32}])
def test_reset_refuses_plans_of_other_engines(rank: EngineRank, changes: dict[str, Any]) -> None:
    plan = derive(rank.plan.config.model_copy(update=changes), rank.plan.profile, SHAPE)
    with pytest.raises(RolloutError, match=f"{plan.cell}: mode, model, topology or limits"):
        rank.reset(plan.to_json())


def test_stop_before_start_is_harmless(rank: EngineRank) -> None:
    rank._live = None
    rank.stop()
