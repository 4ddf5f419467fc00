"""What a request says to vLLM, and what was applied: the two ends of the read-back of sampling settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlk.plan.derive import Plan
from rlk.plan.sampling import Sampling
from rlk.rollout.messages import Request, RolloutError

ARGUMENT = "rlk"
"""Key in SamplingParams.extra_args under which our sampler finds the true settings."""

_LIFTED, _HIGHEST = 0.01, 2.0  # vLLM 0.26.0 lifts 0 < T < 0.01 to 0.01, and refuses T > 2


class Applied(NamedTuple):
    """Settings of one sample as the sampler used them: T as fp32, 0 where greedy; top_p 1 and top_k -1 where off."""

    temperature: float
    top_p: float
    top_k: int


def applied_of(temperature: float, top_p: float, top_k: int, vocabulary: int) -> Applied:
    """The one spelling of settings that mean the same: greedy ignores top-p and top-k, a top-k of everything is off."""
    if temperature == 0:
        return Applied(0.0, 1.0, -1)
    return Applied(float(np.float32(temperature)), top_p, top_k if 1 <= top_k < vocabulary else -1)


def expected(sampling: Sampling, plan: Plan) -> Applied:
    """What must be applied for a request. The stock sampler of native mode keeps top-p in fp32."""
    top_p = float(np.float32(sampling.top_p)) if plan.config.mode == "native" else sampling.top_p
    return applied_of(sampling.temperature, top_p, sampling.top_k, plan.shape.vocab_size)


def parameters(request: Request, plan: Plan) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for a request.

    Stopping is ours: the plan's ids as stop tokens, and vLLM's ignore_eos. Without that vLLM 0.26.0 adds the eos
    ids of generation_config.json even under generation_config="vllm".

    Raises:
        RolloutError: native mode was asked for a temperature that vLLM would lift or refuse.
    """
    common = {
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(plan.stop_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
        "flat_logprobs": True,
    }
    s = request.sampling
    if plan.config.mode == "consistency":
        carried = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k}
        carried |= {"seed": plan.config.seed, "sample_id": request.sample_id}
        return {**common, "temperature": 1.0, "extra_args": {ARGUMENT: carried}}
    if s.temperature != 0 and not _LIFTED <= s.temperature <= _HIGHEST:
        raise RolloutError(
            f"temperature {s.temperature}: native mode allows 0 and {_LIFTED} to {_HIGHEST}, as vLLM's own sampler does"
        )
    # No per-request seed: with chunked prefill vLLM rewinds its generator, which a CPU generator cannot do.
    return {**common, "temperature": s.temperature, "top_p": s.top_p, "top_k": max(s.top_k, 0)}
