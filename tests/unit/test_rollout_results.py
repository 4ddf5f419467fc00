"""Nothing that vLLM returns is repaired on its way into the evidence: bits survive, and misfits are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlk.plan.sampling import Sampling
from rlk.rollout.messages import Generation, Request, RolloutError
from rlk.rollout.results import as_arrays

REQUESTS = [Request(11, 1, [5, 6, 7], Sampling(0.7, 0.9, 20), 8), Request(9, 0, [5], Sampling(0.0), 8)]


def output(tokens: list[int], logprobs: list[float], reason: str = "stop", cached: int = 0) -> Any:
    completion = SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=logprobs), finish_reason=reason)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached)


def outputs() -> dict[int, Any]:
    return {9: output([3], [-0.5], "length"), 11: output([4, 2], [-1.25, 0.0], cached=2)}


def test_columns_follow_the_order_asked() -> None:
    a = as_arrays(REQUESTS, outputs(), 4)
    assert a.sample_id.tolist() == [11, 9]
    assert (a.prompt_len.tolist(), a.prompt_tokens.tolist()) == ([3, 1], [5, 6, 7, 5])
    assert (a.response_len.tolist(), a.tokens.tolist()) == ([2, 1], [4, 2, 3])
    assert (a.finish_reason.tolist(), a.cached_tokens.tolist()) == ([0, 1], [2, 0])
    assert (a.weight_version.tolist(), a.mask.tolist()) == ([4, 4], [1, 1, 1])
    assert (a.temperature.tolist(), a.top_p.tolist(), a.top_k.tolist()) == ([0.7, 0.0], [0.9, 1.0], [20, -1])


def test_every_fp32_word_survives_python_floats() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)
    words[:4] = (0x00000001, 0x80000000, 0x7F7FFFFF, 0xFF800000)  # a denormal, -0, the largest, -inf
    sent = words.view(np.float32)
    sent = sent[~np.isnan(sent)]
    one = {11: output([3] * len(sent), sent.tolist())}
    assert as_arrays(REQUESTS[:1], one, 0).logprobs.tobytes() == sent.tobytes()


def test_logprob_between_fp32_values_is_refused() -> None:
    given = {**outputs(), 9: output([3], [-0.1])}
    with pytest.raises(RolloutError, match="sample 9: a log-prob is no fp32 value"):
        as_arrays(REQUESTS, given, 0)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_other_endings_are_refused(reason: str | None) -> None:
    given = {**outputs(), 9: output([3], [-0.5], reason)}  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match=r"sample 9: vLLM ended it for .*: allowed is stop or length"):
        as_arrays(REQUESTS, given, 0)


def test_short_logprob_lists_are_refused() -> None:
    given = {**outputs(), 11: output([4, 2], [-1.25])}
    with pytest.raises(RolloutError, match="sample 11: 1 log-probs for 2 tokens"):
        as_arrays(REQUESTS, given, 0)


def test_missing_outputs_are_refused_too() -> None:
    with pytest.raises(RolloutError, match="sample 9: vLLM returned nothing for it"):
        as_arrays(REQUESTS, {11: outputs()[11]}, 0)


def test_digest_sees_every_single_bit() -> None:
    base = Generation(0, 0, 0, as_arrays(REQUESTS, outputs(), 4))
    assert base.digest == Generation(0, 1, 0, as_arrays(REQUESTS, outputs(), 4)).digest
    for name, column in base.arrays.columns().items():
        before = column.view(np.uint8)[0]
        column.view(np.uint8)[0] ^= 1
        assert base.digest != Generation(0, 0, 0, as_arrays(REQUESTS, outputs(), 4)).digest, name
        column.view(np.uint8)[0] = before
