"""The start-up proof passes on this machine, and each of its probes fails when its kernel sums in another order.

A proof that cannot fail proves nothing: every kernel is replaced, one at a time, by one that is right to within
rounding and wrong in its order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk.kernels import attention, gemm, pointwise, policy, proof
from rlk.kernels.policy import RowParams
from rlk.kernels.proof import ProofError, prove
from tests.unit.probes import left_to_right

CPU = torch.device("cpu")
KERNELS = ("gemm", "tree", "rmsnorm", "attention", "policy")
Kernel = Callable[..., object]
Pair = tuple[torch.Tensor, torch.Tensor]


def test_every_kernel_is_proved_by_name() -> None:
    proofs = prove(CPU)
    assert tuple(p.name for p in proofs) == KERNELS
    assert all(p.form and p.sentence for p in proofs)


def two_chains(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    half = x.shape[1] // 2
    return LEAF(x[:, :half], prepared[:half]) + LEAF(x[:, half:], prepared[half:])


def unlike_at_one_row(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """As a library does that picks another kernel for a single row."""
    return two_chains(x, prepared) if x.shape[0] == 1 else LEAF(x, prepared)


def torch_product(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    return x.float() @ prepared.float()


def backward_chain(dy: torch.Tensor, w: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    return INPUT_GRADIENT(dy.flip(1), w.flip(0), into)


def two_added(dy: torch.Tensor, w: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Right for a whole chain, wrong for a continued one."""
    fresh = INPUT_GRADIENT(dy, w)
    return fresh if into is None else into + fresh


def tokens_in_reverse(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return WEIGHT_GRADIENT(dy.flip(0), x.flip(0))


def torch_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> Pair:
    rstd = 1.0 / (left_to_right((x.float() * x.float()).t()) / x.shape[1] + eps).sqrt()
    return ((x.float() * rstd[:, None]) * w.float()).to(torch.bfloat16), rstd


def norm_of_the_batch(x: torch.Tensor, w: torch.Tensor, eps: float) -> Pair:
    y, rstd = RMSNORM(x, w, eps)
    return (y.flip(1) if x.shape[0] == 1 else y), rstd


def decode_by_itself(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """As an engine does whose decode kernel splits the keys: one bit of one element."""
    out = PAGED(q, *rest)
    if q.shape[0] == 3:
        out.view(torch.int16)[2, 0, 0] ^= 1
    return out


def other_pages(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return PAGED(q.flip(1), *rest).flip(1)


def float_scores(logits: torch.Tensor, params: RowParams, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    _, inside, mass = SCORE(logits, params, tokens)
    scaled = logits.float() / params.temperature[:, None]
    return scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0], inside, mass


def nothing_in_support(logits: torch.Tensor, params: RowParams, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logprob, inside, mass = SCORE(logits, params, tokens)
    return logprob, torch.zeros_like(inside), mass


def drawn_by_place(logits: torch.Tensor, params: RowParams, seed: torch.Tensor, *rest: torch.Tensor) -> Pair:
    return SAMPLE(logits, params, seed + torch.arange(seed.numel()) * 1_000_003, *rest)


LEAF, INPUT_GRADIENT, WEIGHT_GRADIENT = gemm.leaf, gemm.input_gradient, gemm.weight_gradient
RMSNORM, PAGED, SCORE, SAMPLE = pointwise.rmsnorm, attention.paged, policy.score_rows, policy.sample_rows

WRONG: list[tuple[str, object, str, Kernel]] = [
    ("gemm", gemm, "leaf", two_chains),
    ("gemm", gemm, "leaf", unlike_at_one_row),
    ("gemm", gemm, "leaf", torch_product),
    ("gemm", gemm, "input_gradient", backward_chain),
    ("gemm", gemm, "input_gradient", two_added),
    ("gemm", gemm, "weight_gradient", tokens_in_reverse),
    ("tree", proof, "tree_sum", left_to_right),
    ("rmsnorm", pointwise, "rmsnorm", torch_norm),
    ("rmsnorm", pointwise, "rmsnorm", norm_of_the_batch),
    ("attention", attention, "paged", decode_by_itself),
    ("attention", attention, "paged", other_pages),
    ("policy", policy, "score_rows", float_scores),
    ("policy", policy, "score_rows", nothing_in_support),
    ("policy", policy, "sample_rows", drawn_by_place),
]


@pytest.mark.parametrize(("kernel", "module", "name", "wrong"), WRONG, ids=[f"{w[0]}-{w[3].__name__}" for w in WRONG])
def test_a_wrong_order_stops_the_run(
    kernel: str, module: object, name: str, wrong: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(ProofError, match=f"kernel {kernel}: .*cannot run the canonical program"):
        prove(CPU)


def test_a_probe_that_cannot_tell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = torch.ones(200, 200, dtype=torch.bfloat16)
    monkeypatch.setattr(proof, "_probe_rows", lambda rows, columns, device: equal[:rows, :columns].clone())
    with pytest.raises(ProofError, match="kernel gemm: the probe is not sensitive to order"):
        prove(CPU)
