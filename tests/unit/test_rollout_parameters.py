"""A request reaches vLLM with neutral fields and carries its true settings beside them; what was applied is compared.

T = .005 and p = .9 are the probes: vLLM lifts the first and keeps the second in fp32.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.sampling import Sampling
from rlk.rollout.messages import Request, RolloutError
from rlk.rollout.sampling import ARGUMENT, Applied, applied_of, expected, parameters
from tests.unit.tiny import SHAPE, profile


def plan(mode: str = "consistency", seed: int = 7) -> Plan:
    shape = dataclasses.replace(SHAPE, eos_ids=(2, 5))
    return derive(RunConfig(mode=mode, seed=seed, max_response_len=64), profile(), shape)  # type: ignore[arg-type]


def request(sampling: Sampling, sample_id: int = 3) -> Request:
    return Request(sample_id, 0, [7, 8], sampling, 16)


def test_true_settings_travel_beside_neutral_ones() -> None:
    sent = parameters(request(Sampling(0.005, 0.9, 20), 2**40), plan(seed=2**62))
    assert sent["extra_args"][ARGUMENT] == {
        "temperature": 0.005,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 2**62,
        "sample_id": 2**40,
    }
    assert sent["temperature"] == 1.0
    assert not {"top_p", "top_k", "seed"} & set(sent)


@pytest.mark.parametrize("mode", ["consistency", "native"])
def test_stopping_is_said_by_us(mode: str) -> None:
    sent = parameters(request(Sampling(1.0)), plan(mode))
    assert (sent["stop_token_ids"], sent["ignore_eos"], sent["max_tokens"]) == ([2, 5], True, 16)


def test_no_id_ends_a_response_where_that_is_asked_for() -> None:
    asked = plan()
    asked = dataclasses.replace(asked, config=asked.config.model_copy(update={"ignore_eos": True}))
    sent = parameters(request(Sampling(1.0)), asked)
    assert (sent["stop_token_ids"], sent["ignore_eos"], sent["max_tokens"]) == ([], True, 16)


def test_native_settings_go_to_vllm() -> None:
    sent = parameters(request(Sampling(0.7, 0.95, 20)), plan("native"))
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 0.95, 20)
    assert "extra_args" not in sent
    assert parameters(request(Sampling(0.7)), plan("native"))["top_k"] == 0


def test_native_requests_carry_no_seed() -> None:
    assert "seed" not in parameters(request(Sampling(0.7)), plan("native"))


@pytest.mark.parametrize("temperature", [1e-6, 0.005, 2.5])
def test_native_refuses_a_changed_temperature(temperature: float) -> None:
    with pytest.raises(RolloutError, match=r"native mode allows 0 and 0\.01 to 2\.0"):
        parameters(request(Sampling(temperature)), plan("native"))
    assert parameters(request(Sampling(temperature)), plan())["temperature"] == 1.0


def test_greedy_ignores_nucleus_and_top_k() -> None:
    assert applied_of(0.0, 0.5, 20, 400) == applied_of(0.0, 1.0, -1, 400) == Applied(0.0, 1.0, -1)


@pytest.mark.parametrize("top_k", [-1, 0, 400, 401])
def test_top_k_of_everything_is_off(top_k: int) -> None:
    assert applied_of(1.0, 1.0, top_k, 400).top_k == -1
    assert applied_of(1.0, 1.0, 399, 400).top_k == 399


def test_expected_nucleus_has_the_mode_precision() -> None:
    assert expected(Sampling(0.7, 0.9), plan()).top_p == 0.9
    assert expected(Sampling(0.7, 0.9), plan("native")).top_p == float(np.float32(0.9)) != 0.9
    assert expected(Sampling(0.7), plan()).temperature == float(np.float32(0.7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": []}, "sample 3: prompt_tokens is empty"),
        ({"max_tokens": 0}, "sample 3: max_tokens 0: allowed is >= 1"),
        ({"sample_id": -1}, "sample_id -1: allowed is >= 0"),
    ],
)
def test_impossible_requests_are_refused_early(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(request(Sampling(1.0)), **changes)  # type: ignore[arg-type]
