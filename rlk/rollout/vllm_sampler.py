"""The canonical sampler inside vLLM: a token is a function of its logits, its request's settings and its position.

vLLM's own fields cannot carry the settings: it lifts 0 < T < 0.01 to 0.01, refuses T > 2 and keeps top-p in fp32, which
moves the nucleus. So they stay neutral, the real ones travel in the request's `extra_args`, and a request whose fields
are not neutral is refused: nothing that vLLM offers on top (penalties, bad words, logit bias, min-p, ...) is applied or
ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from rlk.kernels import policy
from rlk.kernels.policy import RowParams
from rlk.model.policy import Policy
from rlk.rollout.messages import RolloutError
from rlk.rollout.sampling import ARGUMENT, Applied, applied_of

NEUTRAL: Mapping[str, object] = MappingProxyType(
    {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "min_tokens": 0,
        "bad_words": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "structured_outputs": None,
        "logprob_token_ids": None,
        "prompt_logprobs": None,
        "logprobs": 0,
        "thinking_token_budget": None,
        "repetition_detection": None,
    }
)
"""The fields of vLLM 0.26.0's SamplingParams that could change a distribution, and the values that change nothing."""


def refuse_unsupported(params: Any) -> None:
    """Raises RolloutError for the first field of a request's SamplingParams that is not neutral."""
    for name, neutral in NEUTRAL.items():
        value = getattr(params, name)
        empty = value is None or value == []  # vLLM turns bad_words None into []
        if value != neutral and not (neutral is None and empty):
            raise RolloutError(f"SamplingParams.{name} {value!r}: consistency mode allows {neutral!r}: leave it out")


@dataclass(frozen=True)
class Rows:
    """What the sampler needs of R requests: settings, and seed and sample_id int64 [R]."""

    params: RowParams
    seed: torch.Tensor
    sample_id: torch.Tensor

    @classmethod
    def of(cls, requests: Sequence[Any], vocabulary: int, device: torch.device) -> Rows:
        """From the SamplingParams of each row.

        Raises:
            RolloutError: a request carries no settings of ours, or asks vLLM for something on top.
        """
        settings = []
        for params in requests:
            refuse_unsupported(params)
            carried = (params.extra_args or {}).get(ARGUMENT)
            if carried is None:
                raise RolloutError(f"a request has no {ARGUMENT!r} in extra_args: send it through EngineRank.generate")
            settings.append(carried)
        params = RowParams.build([(s["temperature"], s["top_p"], s["top_k"]) for s in settings], vocabulary).to(device)
        seed, sample_id = (torch.tensor([s[name] for s in settings], device=device) for name in ("seed", "sample_id"))
        return cls(params, seed, sample_id)

    def applied(self, vocabulary: int) -> dict[int, Applied]:
        """By sample id, the settings as the kernel reads them."""
        p = self.params
        columns = (p.temperature.tolist(), p.top_p.tolist(), p.top_k.tolist(), p.greedy.tolist())
        return {
            sample: applied_of(0.0 if greedy else t, top_p, top_k, vocabulary)
            for sample, t, top_p, top_k, greedy in zip(self.sample_id.tolist(), *columns, strict=True)
        }


class CanonicalSampler(Sampler):  # type: ignore[misc]
    """Replaces the sampler of vLLM's runner. `runner` gives the requests of the batch and the position of each row."""

    def __init__(self, runner: Any, policy: Policy = policy) -> None:
        super().__init__()
        self.runner, self.policy = runner, policy
        self.calls = 0
        self.applied: dict[int, Applied] = {}
        self._ids: list[str] | None = None
        self._rows: Rows | None = None

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """One token a row of logits [R, V] bf16, and its log-probability where requests ask for any.

        vLLM's parent method is not called: it works on a [R, V] matrix of fp32 log-probabilities of its own arithmetic.
        """
        batch = self.runner.input_batch
        if batch.num_reqs == 0:  # the memory profiling run at start-up
            return SamplerOutput(torch.zeros(logits.shape[0], 1, dtype=torch.int32, device=logits.device), None)
        if batch.num_reqs != logits.shape[0]:
            raise RolloutError(f"{logits.shape[0]} rows of logits for {batch.num_reqs} requests: allowed is one each")
        self.calls += 1
        rows = self._rows_of(batch.req_ids, logits)
        # The length of a row's sequence after this step is the position of the token that is drawn now.
        position = self.runner.seq_lens[: batch.num_reqs].to(logits.device, torch.int64)
        tokens, logprobs = self.policy.sample_rows(logits, rows.params, rows.seed, rows.sample_id, position)
        ids = tokens.to(torch.int32)[:, None]
        if sampling_metadata.max_num_logprobs is None:
            return SamplerOutput(ids, None)
        return SamplerOutput(ids, LogprobsTensors(ids, logprobs[:, None], torch.zeros_like(ids[:, 0])))

    def _rows_of(self, ids: Sequence[str], logits: torch.Tensor) -> Rows:
        """Rows of these requests; rebuilt only when the batch changes, since most steps decode the same one."""
        if self._rows is None or self._ids != list(ids):
            vocabulary = logits.shape[1]
            self._ids = list(ids)
            self._rows = Rows.of([self.runner.requests[i].sampling_params for i in ids], vocabulary, logits.device)
            self.applied |= self._rows.applied(vocabulary)
        return self._rows
