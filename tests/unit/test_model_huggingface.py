"""The trainer computes the model that Hugging Face computes: log-probabilities and gradients agree to bf16 accuracy.

The reference is their Qwen3ForCausalLM in float32 on the same bf16 checkpoint. Log-probabilities are tempered over the
full vocabulary, so that no token is lost at the edge of a support; errors are RMS over the 122 response tokens of eight
samples. bf16 keeps 8 bits: activations of size 1 through two layers leave about 2^-6 on logits of size 10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from rlk.plan.sampling import Sampling
from tests.unit import training
from tests.unit.probes import Record

SAMPLES = training.make_samples(mix=(Sampling(0.7), Sampling(1.3), Sampling(0.0), Sampling(1.0)))


class Reference:
    """Log-probabilities [122] in sample and token order, and gradients by checkpoint name."""

    def __init__(self, path: Path) -> None:
        model: Any = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
        rows, weights = [], []
        for s in SAMPLES:
            logits = model(torch.tensor([s.tokens])).logits[0, s.prompt_len - 1 : -1]
            scaled = (logits / (s.sampling.temperature or 1.0)).log_softmax(1)
            rows.append(scaled.gather(1, torch.tensor(s.tokens[s.prompt_len :])[:, None])[:, 0])
            weights.append(torch.from_numpy(training.coefficients(SAMPLES)[s.sample_id]))
        logprobs = torch.cat(rows)
        (logprobs * torch.cat(weights)).sum().backward()
        self.logprobs = logprobs.detach().double()
        self.gradients = {name: p.grad.double() for name, p in model.named_parameters()}


def trained(path: Path, mode: training.Mode) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same of this trainer; TP 2 and CP 4, so that gathering is part of what is compared."""
    plan = training.make_plan(path, mode)
    (step,) = training.run(plan, 2, 4, SAMPLES, steps=1)
    words = b"".join(step.logprobs[key].logprob for key in sorted(step.logprobs))
    logprobs = torch.frombuffer(bytearray(words), dtype=torch.float32).double()
    return logprobs, training.exported(plan.shape, step.gradients)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.fixture(scope="module", params=["checkpoint", "tied_checkpoint"])
def case(request: pytest.FixtureRequest) -> tuple[Reference, Any, Any]:
    path: Path = request.getfixturevalue(request.param)
    return Reference(path), trained(path, "consistency"), trained(path, "native")


def test_log_probabilities_agree_with_hugging_face(case: tuple[Reference, Any, Any], record_property: Record) -> None:
    reference, (canonical, _), (native, _) = case
    ours, theirs = rms(canonical - reference.logprobs), rms(native - reference.logprobs)
    record_property("rms_error", f"{ours:.4g}")
    record_property("rms_error_of_the_ordinary_op", f"{theirs:.4g}")
    assert ours <= 1.05 * theirs, "not coarser than bf16 torch"
    assert ours < 0.05
    assert (canonical - reference.logprobs).abs().max() < 0.25


def test_gradients_agree_with_hugging_face(case: tuple[Reference, Any, Any], record_property: Record) -> None:
    """The error of all tensors together, each relative to its own size."""
    reference, (_, canonical), (_, native) = case
    assert sorted(canonical) == sorted(reference.gradients)
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    for name, exact in reference.gradients.items():
        for whose, found in (("ours", canonical), ("theirs", native)):
            errors[whose].append(rms(found[name].double() - exact) / rms(exact))
        assert errors["ours"][-1] < 0.05, name
    ours, theirs = (rms(torch.tensor(errors[whose])) for whose in ("ours", "theirs"))
    record_property("rms_error", f"{ours:.4g}")
    record_property("rms_error_of_the_ordinary_op", f"{theirs:.4g}")
    assert ours <= 1.05 * theirs, "not coarser than autograd in bf16"


def test_another_model_would_disagree(case: tuple[Reference, Any, Any]) -> None:
    """The bound is tight enough to see a forgotten temperature: the untempered values of the first sample's row."""
    reference, (canonical, _), _ = case
    assert (canonical * 0.7 - reference.logprobs).abs().max() > 0.25
