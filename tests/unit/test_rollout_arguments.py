"""Every setting that a plan asks for is read back and compared: each value that differs must give an error line."""

from __future__ import annotations

from typing import Any

import pytest

from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.rollout.arguments import environment_errors, expected_settings, rank_environment, setting_errors
from rlk.rollout.engine import EngineRank
from rlk.rollout.messages import RolloutError
from tests.unit.tiny import SHAPE, profile


def plan(mode: str = "consistency", rollout_tp: int = 2) -> Plan:
    config = RunConfig(mode=mode, rollout_tp=rollout_tp, max_response_len=64)  # type: ignore[arg-type]
    return derive(config, profile(), SHAPE)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def shown(mode: str = "consistency", **changes: Any) -> dict[str, Any]:
    """What a live engine shows that has all the settings of the plan, and plenty of pages; then the changes."""
    return nested({**expected_settings(plan(mode)), "scheduler.blocks": 1000, **changes})


@pytest.mark.parametrize("mode", ["consistency", "native"])
def test_settings_as_asked_are_accepted(mode: str) -> None:
    assert setting_errors(plan(mode), shown(mode)) == []


@pytest.mark.parametrize(("pages", "fine"), [(8, False), (9, True)])
def test_one_page_beyond_a_sequence(pages: int, fine: bool) -> None:
    """128 tokens fill 8 pages of 16; vLLM keeps one page for itself and would wait for it forever."""
    lines = setting_errors(plan(), shown(**{"scheduler.blocks": pages}))
    assert lines == ([] if fine else ["scheduler.blocks: 8 KV pages: 128 tokens need 9: raise engine.kv_cache_bytes"])


@pytest.mark.parametrize("name", sorted(expected_settings(plan())))
def test_any_other_setting_is_named(name: str) -> None:
    (line,) = setting_errors(plan(), shown(**{name: "other"}))
    assert line.startswith(f"{name}: the plan asks for ")
    assert line.endswith("the live engine shows 'other'")


def test_missing_settings_are_never_fine() -> None:
    settings = shown()
    del settings["worker"]["sampler"]
    with pytest.raises(KeyError, match="sampler"):
        setting_errors(plan(), settings)


def test_modes_expect_different_live_classes() -> None:
    ours, stock = expected_settings(plan()), expected_settings(plan("native"))
    assert {name for name in ours if ours[name] != stock[name]} == {
        "worker.ops",
        "worker.sampler",
        "worker.attention_core",
    }


def test_ranks_find_their_own_place() -> None:
    assert rank_environment(1, 4, 29500, "cpu") == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
    }


def test_missing_environment_is_named_whole() -> None:
    given = dict(plan().engine_env)
    assert environment_errors(plan(), given) == []
    del given["RLK_PLATFORM"]
    given["OMP_NUM_THREADS"] = "4"
    assert environment_errors(plan(), given) == [
        "OMP_NUM_THREADS='4': an engine rank must be started with '1'",
        "RLK_PLATFORM=None: an engine rank must be started with 'cpu'",
    ]


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (2, 2), (-1, 2)])
def test_rank_outside_the_plan_is_refused(rank: int, world: int) -> None:
    with pytest.raises(RolloutError, match="the plan has 2 ranks an engine"):
        EngineRank(plan().to_json(), 0, rank, world, 29500)


def test_wrong_environment_refuses_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in plan().engine_env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(RolloutError, match="VLLM_USE_V2_MODEL_RUNNER='1'"):
        EngineRank(plan().to_json(), 0, 0, 2, 29500)


def test_calls_before_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in plan().engine_env.items():
        monkeypatch.setenv(name, value)
    for name in rank_environment(0, 2, 29500, "cpu"):
        monkeypatch.setenv(name, "")  # so that the test leaves no trace of what the rank sets
    rank = EngineRank(plan().to_json(), 3, 1, 2, 29500)
    with pytest.raises(RolloutError, match="engine 3 rank 1 is not running: call start first"):
        rank.counters()
