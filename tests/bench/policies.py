"""Log-probabilities, their gradients and sampling over 151,936 logits beside log_softmax and a sort."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlk.kernels import policy
from rlk.kernels.policy import RowParams
from tests.bench.case import Case
from tools.gpu.data import DEVICE, VOCAB, normal

SETTINGS = {"whole": (0.7, 1.0, -1), "top-k": (0.7, 1.0, 50), "top-p": (0.7, 0.95, -1), "both": (0.7, 0.95, 50)}
T = 0.7


def cases() -> Iterator[Case]:
    """A decode batch of 64 rows, a scoring batch of 4,096."""
    for rows in (64, 4096):
        yield _score(rows)
        yield _gradient(rows)
        for name in SETTINGS:
            yield _truncated(rows, name)
            if rows == 64:
                yield _sample(rows, name)


def _logits(rows: int) -> torch.Tensor:
    """Peaked, as a trained model's are."""
    x = normal(rows, VOCAB, seed=26, scale=2.5)
    x[:, ::1000] += 8
    return x


def _tokens(rows: int) -> torch.Tensor:
    return (torch.arange(rows, device=DEVICE) * 1000) % VOCAB


def _params(rows: int, name: str) -> RowParams:
    return RowParams.build([SETTINGS[name]] * rows, VOCAB).to(DEVICE)


def _log_softmax(x: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scaled = x.to(dtype) / torch.tensor(T, device=x.device).to(dtype)  # T as both sides hold it, in fp32
    return scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0]


def _exact(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    rows = zip(x.split(256), tokens.split(256), strict=True)
    return torch.cat([_log_softmax(a, b, torch.float64) for a, b in rows])


def _score(rows: int) -> Case:
    params = _params(rows, "whole")
    return Case(
        "log-probability, whole vocabulary", f"{rows} rows", lambda: (_logits(rows), _tokens(rows)),
        {"triton": lambda x, tokens: policy.score_rows(x, params, tokens)[0]},
        ("log_softmax in fp32 and gather", _log_softmax), _exact,
    )  # fmt: skip


def _gradient(rows: int) -> Case:
    params, coefficients = _params(rows, "whole"), torch.linspace(-1, 1, rows, device=DEVICE)

    def ordinary(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        a = x.detach().requires_grad_()
        return torch.autograd.grad((_log_softmax(a, tokens) * coefficients).sum(), a)[0]

    return Case(
        "log-probability, forward and gradient", f"{rows} rows", lambda: (_logits(rows), _tokens(rows)),
        {"triton": lambda x, tokens: policy.score_backward(x, params, tokens, coefficients)},
        ("autograd of log_softmax in fp32", ordinary),
    )  # fmt: skip


def _sorted(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in rank order, what is cut off zero, and the ids: as engines do it."""
    _, p, k = SETTINGS[name]
    values, ids = (x.float() / T).sort(dim=1, descending=True)
    if k > 0:
        values[:, k:] = -torch.inf
    probabilities = values.softmax(1)
    if p < 1:
        probabilities = probabilities.masked_fill(probabilities.cumsum(1) - probabilities >= p, 0.0)
    return probabilities, ids


def _truncated(rows: int, name: str) -> Case:
    params = _params(rows, name)

    def ordinary(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        probabilities, ids = _sorted(x, name)
        kept = probabilities / probabilities.sum(1, keepdim=True)
        return torch.where(ids == tokens[:, None], kept, 0.0).sum(1).log()

    return Case(
        f"log-probability, {name}", f"{rows} rows", lambda: (_logits(rows), _tokens(rows)),
        {"triton": lambda x, tokens: policy.score_rows(x, params, tokens)[0]},
        ("sort, cumulative sum, log", ordinary) if name != "whole" and rows <= 64 else None,
    )  # fmt: skip


def _sample(rows: int, name: str) -> Case:
    params = _params(rows, name)

    def ordinary(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if name == "whole":
            return (x.float() / T).softmax(1).multinomial(1)[:, 0]
        probabilities, ids = _sorted(x, name)
        return ids.gather(1, probabilities.multinomial(1))[:, 0]

    return Case(
        f"sampling with its log-probability, {name}", f"{rows} rows", lambda: (_logits(rows), _tokens(rows)),
        {"triton": lambda x, tokens: policy.sample_rows(x, params, tokens, tokens, tokens)},
        ("softmax, multinomial" if name == "whole" else "sort, cumulative sum, multinomial", ordinary),
    )  # fmt: skip
