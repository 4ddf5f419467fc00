"""The sampler reads true settings from requests and positions from the runner, and refuses what it would not apply.

A fake runner stands for vLLM's: five rows of 401 bf16 logits with five samplings, T = .005 and p = .9 among them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlk.kernels.policy import RowParams, sample_rows
from rlk.rollout.messages import RolloutError
from rlk.rollout.sampling import ARGUMENT, Applied
from tests.unit.vllm_modules import with_vllm

VOCABULARY = 401
SETTINGS = [(0.0, 0.5, 3), (0.7, 0.95, -1), (1.3, 0.99, 20), (1.0, 1.0, -1), (0.005, 0.9, -1)]
POSITIONS = [5, 130, 17, 1, 64]


@pytest.fixture(scope="module")
def sampler() -> Any:
    return with_vllm("vllm_sampler")


def params(index: int, **changes: Any) -> Any:
    from vllm import SamplingParams

    temperature, top_p, top_k = SETTINGS[index]
    carried = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": 7, "sample_id": 100 + index}
    return SamplingParams(**{"logprobs": 0, "extra_args": {ARGUMENT: carried}, **changes})


def runner(order: list[int]) -> Any:
    requests = {str(i): SimpleNamespace(sampling_params=params(i)) for i in order}
    batch = SimpleNamespace(req_ids=list(requests), num_reqs=len(order))
    seq_lens = torch.tensor([POSITIONS[i] for i in order] + [0, 0], dtype=torch.int32)
    return SimpleNamespace(input_batch=batch, requests=requests, seq_lens=seq_lens)


def logits() -> torch.Tensor:
    return (3 * torch.randn(len(SETTINGS), VOCABULARY, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)


METADATA = SimpleNamespace(max_num_logprobs=0)


def test_rows_are_sampled_with_true_settings(sampler: Any) -> None:
    made = sampler.CanonicalSampler(runner(list(range(5))))
    out = made.forward(logits(), METADATA)
    ids, seed = torch.arange(100, 105), torch.full((5,), 7)
    tokens, logprobs = sample_rows(logits(), RowParams.build(SETTINGS, VOCABULARY), seed, ids, torch.tensor(POSITIONS))
    assert out.sampled_token_ids[:, 0].tolist() == tokens.tolist()
    assert out.sampled_token_ids.dtype == torch.int32
    assert out.logprobs_tensors.logprobs[:, 0].numpy().tobytes() == logprobs.numpy().tobytes()
    assert made.calls == 1


def test_order_of_rows_changes_nothing(sampler: Any) -> None:
    straight = sampler.CanonicalSampler(runner([0, 1, 2, 3, 4])).forward(logits(), METADATA)
    order = [3, 0, 4, 2, 1]
    turned = sampler.CanonicalSampler(runner(order)).forward(logits()[order], METADATA)
    assert turned.sampled_token_ids.tolist() == straight.sampled_token_ids[order].tolist()
    a, b = turned.logprobs_tensors.logprobs, straight.logprobs_tensors.logprobs[order]
    assert a.numpy().tobytes() == b.numpy().tobytes()


def test_position_and_sample_key_the_draw(sampler: Any) -> None:
    row = logits()[3:4].repeat(64, 1)

    def drawn(positions: range, first_sample: int) -> list[int]:
        fake = runner([3])
        one = fake.requests["3"].sampling_params
        one.extra_args[ARGUMENT]["sample_id"] = first_sample
        fake.requests = {str(i): fake.requests["3"] for i in range(64)}
        fake.input_batch = SimpleNamespace(req_ids=list(fake.requests), num_reqs=64)
        fake.seq_lens = torch.tensor(list(positions), dtype=torch.int32)
        tokens: list[int] = sampler.CanonicalSampler(fake).forward(row, METADATA).sampled_token_ids[:, 0].tolist()
        return tokens

    assert drawn(range(64), 1) == drawn(range(64), 1)
    assert drawn(range(64), 1) != drawn(range(64), 2)
    assert drawn(range(64), 1)[1:] == drawn(range(1, 65), 1)[:-1]


def test_logprob_bits_survive_the_lists(sampler: Any) -> None:
    tensors = sampler.CanonicalSampler(runner(list(range(5)))).forward(logits(), METADATA).logprobs_tensors
    floats = [float(row[0]) for row in tensors.tolists().logprobs.tolist()]
    assert np.array(floats, np.float32).tobytes() == tensors.logprobs[:, 0].numpy().tobytes()


def test_applied_settings_are_those_read(sampler: Any) -> None:
    made = sampler.CanonicalSampler(runner(list(range(5))))
    made.forward(logits(), METADATA)
    fp32 = [float(np.float32(t)) for t, _, _ in SETTINGS]
    assert made.applied == {
        100: Applied(0.0, 1.0, -1),
        101: Applied(fp32[1], 0.95, -1),
        102: Applied(fp32[2], 0.99, 20),
        103: Applied(1.0, 1.0, -1),
        104: Applied(fp32[4], 0.9, -1),
    }


def test_rows_are_renewed_with_the_batch(sampler: Any) -> None:
    fake = runner([0, 1])
    made = sampler.CanonicalSampler(fake)
    made.forward(logits()[:2], METADATA)
    fake.requests["2"] = runner([2]).requests["2"]
    fake.input_batch.req_ids[1] = "2"  # vLLM changes its own list in place
    made.forward(logits()[[0, 2]], METADATA)
    assert set(made.applied) == {100, 101, 102}


def test_profiling_without_requests_is_served(sampler: Any) -> None:
    out = sampler.CanonicalSampler(runner([])).forward(logits(), METADATA)
    assert out.sampled_token_ids.shape == (5, 1)
    assert out.logprobs_tensors is None


def test_rows_and_requests_must_match(sampler: Any) -> None:
    with pytest.raises(RolloutError, match="5 rows of logits for 2 requests"):
        sampler.CanonicalSampler(runner([0, 1])).forward(logits(), METADATA)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("temperature", 0.0),
        ("top_p", 0.9),
        ("top_k", 20),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.05),
        ("seed", 0),
        ("seed", 3),
        ("min_tokens", 2),
        ("bad_words", ["x"]),
        ("logit_bias", {1: 1.0}),
        ("allowed_token_ids", [1]),
        ("prompt_logprobs", 1),
        ("logprobs", 5),
        ("n", 2),
    ],
)
def test_what_is_not_applied_is_refused(sampler: Any, field: str, value: object) -> None:
    with pytest.raises(RolloutError, match=rf"SamplingParams\.{field} "):
        sampler.refuse_unsupported(params(3, **{field: value}))


def test_requests_without_our_settings_are_refused(sampler: Any) -> None:
    with pytest.raises(RolloutError, match="a request has no 'rlk' in extra_args"):
        sampler.Rows.of([params(3, extra_args=None)], VOCABULARY, torch.device("cpu"))


def test_every_field_of_vllm_is_judged(sampler: Any) -> None:
    """A release of vLLM with a new knob must not slip through: it fails here until the knob is judged."""
    from vllm import SamplingParams

    harmless = {
        "stop", "stop_token_ids", "ignore_eos", "max_tokens", "flat_logprobs", "detokenize", "skip_special_tokens",
        "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "skip_clone",
        "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids", "extra_args",
        "routed_experts_prompt_start", "_bad_words_token_ids", "skip_reading_prefix_cache",
    }  # fmt: skip
    assert set(SamplingParams.__struct_fields__) == harmless | set(sampler.NEUTRAL)
