"""From what vLLM returned to the arrays of the evidence, refusing whatever does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk.evidence.arrays import LENGTH, STOP, RolloutArrays
from rlk.rollout.messages import Request, RolloutError

_REASONS = {"stop": STOP, "length": LENGTH}


def as_arrays(requests: Sequence[Request], outputs: Mapping[int, Any], weight_version: int) -> RolloutArrays:
    """The columns of `rollout-EE.safetensors`, in the order of the requests; a response holds the token that ended it.

    outputs: vLLM's RequestOutput by sample id.

    Raises:
        RolloutError: an output is missing, ended for another reason than stop or length, or its log-probs are not one
            fp32 value a token.
    """
    completions = [_completion(r.sample_id, outputs) for r in requests]
    tokens = [np.asarray(c.token_ids, dtype=np.int32) for c in completions]
    logprobs = [_exact_fp32(r.sample_id, c.logprobs.logprobs) for r, c in zip(requests, completions, strict=True)]
    n = len(requests)
    return RolloutArrays(
        sample_id=np.fromiter((r.sample_id for r in requests), np.int64, n),
        prompt_index=np.fromiter((r.prompt_index for r in requests), np.int64, n),
        prompt_len=np.fromiter((len(r.prompt_tokens) for r in requests), np.int32, n),
        response_len=np.fromiter(map(len, tokens), np.int32, n),
        prompt_tokens=_joined([np.asarray(r.prompt_tokens, dtype=np.int32) for r in requests], np.int32),
        tokens=_joined(tokens, np.int32),
        mask=np.ones(sum(map(len, tokens)), np.uint8),
        logprobs=_joined(logprobs, np.float32),
        temperature=np.fromiter((r.sampling.temperature for r in requests), np.float64, n),
        top_p=np.fromiter((r.sampling.top_p for r in requests), np.float64, n),
        top_k=np.fromiter((r.sampling.top_k for r in requests), np.int64, n),
        finish_reason=np.fromiter((_REASONS[c.finish_reason] for c in completions), np.uint8, n),
        weight_version=np.full(n, weight_version, np.int64),
        cached_tokens=np.fromiter((outputs[r.sample_id].num_cached_tokens for r in requests), np.int64, n),
    )


def _completion(sample_id: int, outputs: Mapping[int, Any]) -> Any:
    if sample_id not in outputs:
        raise RolloutError(f"sample {sample_id}: vLLM returned nothing for it")
    (completion,) = outputs[sample_id].outputs
    if completion.finish_reason not in _REASONS:
        raise RolloutError(
            f"sample {sample_id}: vLLM ended it for {completion.finish_reason!r}: allowed is {' or '.join(_REASONS)}"
        )
    tokens, logprobs = len(completion.token_ids), len(completion.logprobs.logprobs)
    if tokens != logprobs:
        raise RolloutError(f"sample {sample_id}: {logprobs} log-probs for {tokens} tokens")
    return completion


def _exact_fp32(sample_id: int, values: Sequence[float]) -> NDArray[np.float32]:
    """The fp32 values that vLLM carried as Python floats, refused if one of them is no fp32 value."""
    wide = np.asarray(values, dtype=np.float64)
    narrow = wide.astype(np.float32)
    if not np.array_equal(narrow.astype(np.float64), wide, equal_nan=True):
        raise RolloutError(f"sample {sample_id}: a log-prob is no fp32 value: something computed with it on the way")
    return narrow


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
