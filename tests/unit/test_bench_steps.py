"""The step benchmark measures one arm at a time, keeps what is there when time is over, and counts full steps alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlk.plan.topology import Topology
from tests.bench.engines import WARM, StepClock, prompts
from tests.bench.step_sizes import ARMS, NUCLEUS, STOCK, WHOLE, Decode, Sizes, beside, decodes, environment, plan
from tests.bench.steps import run

SMALL = Sizes(requests=(4, 2), context=32, new=24, batched=32, samples=2, length=64, prompt=16, updates=3)

ARM = """
import json, pathlib, sys, time
arm, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if arm == "dies": sys.exit("no such kernel")
if arm == "never": time.sleep(60)
(folder / f"{arm}.ready").touch()
while not (folder / f"{arm}.go").exists(): time.sleep(.01)
begin = time.monotonic()
found = {"measured": [{"tokens": 8, "score_ms": 1.5}]}
(folder / f"{arm}.json").write_text(json.dumps(found))
if arm == "slow": time.sleep(60)
time.sleep(.2)
(folder / f"{arm}.json").write_text(json.dumps(found | {"complete": True, "span": [begin, time.monotonic()]}))
"""


def start(arm: str, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"{arm}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", ARM, arm, str(folder)], stdout=log, stderr=subprocess.STDOUT)


def test_arms_are_measured_one_after_the_other_and_told_at_once() -> None:
    told: list[list[str]] = []
    found = run(["one", "two", "three"], start, (20, 20, 60), lambda all: told.append(list(all)))
    spans = [found[arm]["span"] for arm in ("one", "two", "three")]
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert told == [["one"], ["one", "two"], ["one", "two", "three"]]


def test_an_arm_that_dies_or_is_late_says_so_and_the_others_are_measured() -> None:
    found = run(["dies", "never", "slow", "one"], start, (1.5, 1.0, 30), lambda _: None)
    assert found["one"]["complete"]
    assert found["dies"]["ended"] == "starting: exit code 1"
    assert "no such kernel" in found["dies"]["log"]
    assert found["never"]["ended"] == "starting: its time was over"
    assert found["slow"]["ended"] == "measuring: its time was over"
    assert found["slow"]["measured"] == [{"tokens": 8, "score_ms": 1.5}]


class _Engine:
    """As much of vLLM's LLMEngine as the clock touches: it takes the batches that it is given, one a step."""

    def __init__(self, batches: list[Mapping[str, int]]) -> None:
        self.batches = batches
        self.scheduler = self.engine_core = self
        self.num_scheduled_tokens: Mapping[str, int] = {}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def schedule(self, *_: Any) -> Any:
        self.num_scheduled_tokens = self.batches.pop(0)
        return self

    def step(self) -> str:
        if self.batches[0]:
            self.scheduler.schedule(False)
        else:  # the last result is waited for, and nothing is left to schedule
            self.batches.pop(0)
        return "outputs"


def clock_over(*batches: Mapping[str, int]) -> StepClock:
    engine = _Engine(list(batches))
    clock = StepClock(engine)
    clock.begin()
    while engine.batches:
        assert engine.step() == "outputs"
    return clock


def test_only_steps_that_decode_every_request_are_decode_steps() -> None:
    whole, tail, prefill, mixed = {"a": 1, "b": 1}, {"b": 1}, {"a": 8}, {"a": 1, "b": 7}
    clock = clock_over(*[prefill] * 3, mixed, *[whole] * (WARM + 5), tail, {})
    told = clock.told(Decode(2, 16, 24, NUCLEUS), 8)
    assert told["decode_steps"] == 5
    assert told["decode_ms"] > 0
    assert "prefill_ms" not in told
    assert told["sampling"] == "0.7/0.95/-1"
    told = clock_over(*[mixed] * (WARM + 4), *[whole] * (WARM + 1)).told(Decode(2, 16, 24, NUCLEUS), 8)
    assert told["prefill_steps"] == 4


def test_a_batch_that_never_ran_whole_has_no_median() -> None:
    with pytest.raises(AssertionError, match="none of 3 steps decoded all requests"):
        clock_over({"a": 1}, {"a": 1}, {"a": 1}).told(Decode(2, 16, 24, NUCLEUS), 8)


def test_prompts_share_no_beginning_and_are_the_same_again() -> None:
    case = Decode(16, 32, 24, WHOLE)
    drawn = prompts(case, 1000, 0)
    assert drawn == prompts(case, 1000, 0)
    assert len({tuple(p[:8]) for p in drawn + prompts(case, 1000, 16)}) == 32
    assert all(0 <= t < 999 for p in drawn for t in p)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_has_a_plan_of_one_rank_with_room_for_its_batches(arm: str) -> None:
    made, sizes = plan(arm, "hopper-small", Sizes()), Sizes()
    assert (made.train, made.rollout, made.engines) == (Topology(1, 1), Topology(1, 1), 1)
    assert made.max_model_len >= max(sizes.context + sizes.new, sizes.length)
    assert made.token_budget == sizes.samples * sizes.length
    tokens = max(sizes.requests) * (sizes.context + sizes.new)
    assert made.profile.engine.kv_cache_bytes > tokens * made.shape.kv_bytes(1, 1)
    assert made.graph_sizes == (() if arm.endswith(" native") else (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64))
    assert all(case.requests in made.graph_sizes for case in decodes(sizes, arm) if made.graph_sizes)


def test_steps_of_all_batches_remain_after_the_warm_ones() -> None:
    sizes = Sizes()
    for case in decodes(sizes, "decode stock"):
        prefilling = -(-case.requests * case.context // sizes.batched)
        assert case.new - prefilling - WARM >= 20


def test_only_stock_arms_run_without_what_the_product_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "RLK_PLATFORM", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "of the caller")
    for arm in ARMS:
        made = environment(arm, plan(arm, "hopper-small", Sizes()), tmp_path)
        assert made.get("CUBLAS_WORKSPACE_CONFIG") == (None if arm in STOCK else ":0:0")
        assert made.get("RLK_PLATFORM") == ("cuda" if arm in ("decode consistency", "decode native") else None)
        assert ("TORCHDYNAMO_DISABLE" in made) == (arm not in STOCK)
        if arm.startswith("decode"):
            assert made["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            assert made.get("VLLM_USE_V2_MODEL_RUNNER") == (None if arm == "decode stock-default" else "0")


def test_arms_stand_beside_each_other_by_what_they_measured() -> None:
    decoded = Decode(64, 512, 64, NUCLEUS).described()
    arms = {
        "decode consistency": {"measured": [{**decoded, "decode_ms": 4.0, "prefill_ms": 10.0}]},
        "decode stock": {"measured": [{**decoded, "decode_ms": 5.0}, {**decoded, "logprobs": False, "decode_ms": 3.0}]},
        "train consistency": {"measured": [{"tokens": 2048, "score_ms": 20.0, "update_ms": 80.0}]},
        "train native": {"error": "RuntimeError: out of memory"},
    }
    table = beside(arms)
    row = "decode: decode_ms, 64 requests, context 512, T/p/k 0.7/0.95/-1"
    assert table[row] == {"ms": {"consistency": 4.0, "stock": 5.0}, "speed_of_consistency": {"stock": 1.25}}
    assert table[f"{row}, no log-probs"] == {"ms": {"stock": 3.0}}
    assert table["train: update_ms, 2048 tokens"] == {"ms": {"consistency": 80.0}, "speed_of_consistency": {}}


@pytest.mark.parametrize("arm", ["train consistency", "train native"])
def test_a_trainer_is_measured_from_its_ready_to_its_result(arm: str, tmp_path: Path) -> None:
    made = plan(arm, "tiny-cpu", SMALL)
    command = [sys.executable, "-m", "tests.bench.step_arm", arm, str(tmp_path), "tiny-cpu", SMALL.to_json()]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(arm, made, tmp_path), stdout=log, stderr=log)
    watcher = threading.Timer(100, process.kill)
    watcher.start()
    (tmp_path / f"{arm}.go").touch()
    assert process.wait() == 0, (tmp_path / "log").read_text()
    watcher.cancel()
    found = json.loads((tmp_path / f"{arm}.json").read_text())
    assert found.get("complete"), found
    assert found["settings"]["mode"] == arm.removeprefix("train ")
    (measured,) = found["measured"]
    assert (measured["tokens"], measured["response_tokens"], measured["steps"]) == (128, 96, 3)
    assert measured["score_ms"] > 0
    assert measured["update_ms"] > 0
