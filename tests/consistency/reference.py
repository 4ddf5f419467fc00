"""Log-probabilities by someone else's code: transformers' Qwen3ForCausalLM on the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.evidence.arrays import RolloutArrays


def split(flat: NDArray[np.generic], lengths: NDArray[np.int32]) -> list[NDArray[np.generic]]:
    """A ragged column by sample."""
    return np.split(flat, np.cumsum(lengths)[:-1])


def untempered_logprobs(model: Path, arrays: RolloutArrays, samples: list[int], dtype: torch.dtype) -> torch.Tensor:
    """float64 log-softmax of the model's logits at the response tokens of these samples, one after the other."""
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(model, dtype=dtype).eval()
    prompts, responses = split(arrays.prompt_tokens, arrays.prompt_len), split(arrays.tokens, arrays.response_len)
    out = []
    for i in samples:
        ids = torch.from_numpy(np.concatenate([prompts[i], responses[i]])).long()
        with torch.no_grad():
            rows = network(ids[None]).logits[0, len(prompts[i]) - 1 : -1].double().log_softmax(-1)
        out.append(rows.gather(1, ids[len(prompts[i]) :, None])[:, 0])
    return torch.cat(out)
