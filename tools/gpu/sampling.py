"""Sampling and scoring over 151,936 logits: the support of a sort, the draws of a second Philox, any batch."""

from __future__ import annotations

import torch

from rlk.kernels import policy
from rlk.kernels.policy import RowParams
from tests.unit.exact_policy import WORD, philox
from tools.gpu.data import DEVICE, VOCAB, equal, normal
from tools.gpu.report import Report
from tools.gpu.sorted_policy import Setting, supports

SETTINGS: list[Setting] = [
    (1.0, 1.0, -1), (0.7, 0.95, -1), (1.3, 0.99, 20), (0.0, 0.5, 3), (2.0, 1.0, 7), (0.5, 0.3, -1), (1.0, 1e-9, -1),
    (1.0, 1e-300, -1), (0.8, 0.9999, 100_000), (3e38, 0.5, -1), (1e-30, 0.5, -1), (1.0, 0.5, 40), (1.5, 0.999, -1),
    (1.0, 1.0, 1), (0.005, 0.9, 50), (1.0, 0.1, 151_935),
]  # fmt: skip


def run(report: Report) -> None:
    """Several kinds of logits; rows of all settings in one batch."""
    for name, logits in _kinds().items():
        report.check(f"support, masses and scores, {name}", lambda x=logits: _scores(x))
        report.check(f"draws, {name}", lambda x=logits: _draws(x))
    report.check("batches", _batches)
    report.check("a bad row is named", _refusal)


def _kinds() -> dict[str, torch.Tensor]:
    r = len(SETTINGS)
    flat, peaked = normal(r, VOCAB, seed=1, scale=0.3), normal(r, VOCAB, seed=2, scale=2.5)
    peaked[:, ::1000] += 12
    tied = (normal(r, VOCAB, seed=3, scale=2) * 2).round() / 2
    equal_row = torch.full((r, VOCAB), 1.5, device=DEVICE).to(torch.bfloat16)
    wide = normal(r, VOCAB, seed=4, scale=1) * torch.exp2(torch.randint(-60, 60, (r, VOCAB), device=DEVICE).float())
    return {"flat": flat, "peaked": peaked, "tied": tied, "equal": equal_row, "wide": wide.to(torch.bfloat16)}


def _params_of(r: int) -> RowParams:
    return RowParams.build((SETTINGS * (r // len(SETTINGS) + 1))[:r], VOCAB).to(DEVICE)


def _scores(logits: torch.Tensor) -> dict[str, float]:
    r, params = logits.shape[0], _params_of(logits.shape[0])
    masses, stays = supports(logits, params)
    kept = (masses * stays).sum(1)
    ids = torch.arange(VOCAB, device=DEVICE)
    last_kept = torch.where(stays, ids, -1).amax(1)
    first_out = torch.where(stays, VOCAB - 1, ids).amin(1)
    worst = 0.0
    for tokens in (logits.float().argmax(1), last_kept, first_out, (ids[:r] * 9000 + 17) % VOCAB):
        logprob, inside, mass = policy.score_rows(logits, params, tokens)
        equal(mass, kept, "kept mass")
        equal(inside, stays.gather(1, tokens[:, None])[:, 0], "membership")
        gap = logits.float().gather(1, tokens[:, None])[:, 0] - logits.float().amax(1)
        d = (gap / params.temperature).double()
        exact = d - (kept.double() * 2.0**-40).log()
        finite = exact.isfinite()
        worst = max(worst, float((logprob.double() - exact)[finite].abs().div(exact[finite].abs() + 1e-30).max()))
        if not bool((logprob <= 0).all()):
            raise AssertionError("a log-probability is positive")
    if worst > 2**-23:
        raise AssertionError(f"a log-probability is off by {worst:.3g} of itself, one rounding is 6e-8")
    return {"largest_relative_error": worst, "kept_share": float(stays.double().mean())}


def _draws(logits: torch.Tensor) -> str:
    rows, repeat = logits.shape[0], 8
    many = logits.repeat(repeat, 1)
    params, n = _params_of(rows * repeat), rows * repeat
    params = RowParams.build(SETTINGS * repeat, VOCAB).to(DEVICE)
    seed, ids = torch.full((n,), (7 << 40) + 5, device=DEVICE), torch.arange(n, device=DEVICE) + (3 << 33)
    positions = torch.arange(n, device=DEVICE) * 13
    tokens, logprob = policy.sample_rows(many, params, seed, ids, positions)
    masses, stays = supports(many, params)
    kept = masses * stays
    words = [
        philox((p & WORD, i & WORD, i >> 32 & WORD, 0), (s & WORD, s >> 32 & WORD))[:2]
        for s, i, p in zip(seed.tolist(), ids.tolist(), positions.tolist(), strict=True)
    ]
    u = [((a << 32 | b) * z) >> 64 for (a, b), z in zip(words, kept.sum(1).tolist(), strict=True)]
    expected = torch.searchsorted(kept.cumsum(1), torch.tensor(u, device=DEVICE)[:, None], right=True)[:, 0]
    lowest = (many.float() == many.float().amax(1, keepdim=True)).int().argmax(1)
    equal(tokens, torch.where(params.greedy, lowest, expected), "drawn tokens")
    again, inside, _ = policy.score_rows(many, params, tokens)
    equal(again, logprob, "scores of drawn tokens")
    if not bool(inside.all()):
        raise AssertionError("a drawn token is outside its support")
    return f"{n} rows"


def _batches() -> str:
    logits = _kinds()["peaked"]
    r, params, tokens = logits.shape[0], _params_of(logits.shape[0]), torch.arange(logits.shape[0], device=DEVICE)
    whole = policy.score_rows(logits, params, tokens)
    gradient = policy.score_backward(logits, params, tokens, torch.ones(r, device=DEVICE))
    order = torch.arange(r, device=DEVICE).flip(0)
    some = policy.score_rows(logits[order], params.rows(order), tokens[order])
    for a, b in zip(some, whole, strict=True):
        equal(a, b[order], "another order of rows")
    for i in range(r):
        one = order[i : i + 1]
        alone = policy.score_rows(logits[one], params.rows(one), tokens[one])
        equal(alone[0], whole[0][one], "a row alone")
        back = policy.score_backward(logits[one], params.rows(one), tokens[one], torch.ones(1, device=DEVICE))
        equal(back, gradient[one], "a gradient alone")
    padded = torch.cat([logits, logits[:, :640]], 1)[:, :VOCAB]
    equal(policy.score_rows(padded, params, tokens)[0], whole[0], "rows of a padded matrix")
    return f"{r} rows in three batches"


def _refusal() -> str:
    logits = _kinds()["flat"]
    logits[5, VOCAB - 1] = float("nan")
    params, tokens = _params_of(logits.shape[0]), torch.zeros(logits.shape[0], dtype=torch.int64, device=DEVICE)
    try:
        policy.score_rows(logits, params, tokens)
    except policy.NonFiniteLogitError as error:
        return str(error)
    raise AssertionError("a NaN went through")
