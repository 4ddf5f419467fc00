"""Error against float64 beside that of the ordinary op on the same data; allowed is 1.05 times it."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from rlk.kernels import attention, gemm, pointwise, policy
from rlk.kernels.policy import RowParams
from tools.gpu.data import DEVICE, normal, rms
from tools.gpu.report import Report

ALLOWED = 1.05


def _compare(report: Report, name: str, ours: torch.Tensor, ordinary: torch.Tensor, exact: torch.Tensor) -> None:
    a, b = rms(ours, exact), rms(ordinary, exact)
    report.add(name, a <= ALLOWED * b, rms_error=a, ordinary_rms_error=b, ratio=a / b if b else math.inf)


def run(report: Report) -> None:
    """All ops; each part is an entry of its own if it fails."""
    for part in (_products, _gradients, _attention_rows, _norms, _swiglu, _probabilities):
        report.check(f"{part.__name__[1:]} ran", lambda p=part: p(report))


def _products(report: Report) -> None:
    for m in (16, 2048):
        x, w = normal(m, 4096, seed=1), normal(6144, 4096, seed=2, scale=1 / 64)
        exact = x.double() @ w.double().t()
        _compare(report, f"column product, M {m}", gemm.linear(x, gemm.prepare(w)), x @ w.t(), exact)
        w = normal(8, 4096, 1536, seed=3, scale=1 / 110)
        x, whole = normal(m, 8, 1536, seed=4), w.transpose(0, 1).reshape(4096, -1)
        exact = x.flatten(1).double() @ whole.double().t()
        ours = gemm.round_bf16(gemm.row_leaves(x, gemm.prepare(w)))
        _compare(report, f"row product, M {m}", ours, x.flatten(1) @ whole.t(), exact)


def _gradients(report: Report) -> None:
    dy, w, x = normal(1024, 8, 768, seed=5), normal(8, 768, 4096, seed=6, scale=1 / 64), normal(1024, 4096, seed=7)
    flat = dy.flatten(1)
    exact = flat.double() @ w.flatten(0, 1).double()
    ours = gemm.round_bf16(gemm.column_input_leaves(dy, w))
    _compare(report, "column input gradient", ours, flat @ w.flatten(0, 1), exact)
    slices = [[(i * 128, (i + 1) * 128) for i in range(8)]]
    exact = flat.double().t() @ x.double()
    _compare(report, "weight gradient", gemm.weight_gradients(flat, x, slices)[0], flat.t() @ x, exact)


def _attention_rows(report: Report) -> None:
    n, heads, kv_heads, d = 2048, 32, 8, 128
    q, k, v = (normal(n, h, d, seed=s) for s, h in ((8, heads), (9, kv_heads), (10, kv_heads)))
    dout, ends = normal(n, heads, d, seed=11), torch.tensor([0, n], device=DEVICE)
    positions = torch.arange(n, device=DEVICE)

    def sdpa(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [t.to(dtype).transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
        wide = [inputs[0], *(t.repeat_interleave(heads // kv_heads, 1) for t in inputs[1:])]
        out = functional.scaled_dot_product_attention(*wide, is_causal=True)
        grads = torch.autograd.grad(out, inputs, dout.to(dtype).transpose(0, 1)[None])
        return [t[0].detach().transpose(0, 1) for t in (out, *grads)]

    out, lse = attention.packed(q, k, v, positions, ends, ends)
    slices = [[(i * n // 8, (i + 1) * n // 8) for i in range(8)]]
    dq, dkv = attention.packed_gradients(dout, q, k, v, out, lse, positions, ends, ends.tolist(), slices)
    dk = gemm.round_bf16(dkv[:, 0] * attention.softmax_scale(q))
    ours = (out, dq, dk, gemm.round_bf16(dkv[:, 1]))
    exact = sdpa(torch.float64)
    for name, found, ordinary, true in zip(("out", "dq", "dk", "dv"), ours, sdpa(torch.bfloat16), exact, strict=True):
        _compare(report, f"attention {name}", found, ordinary, true)


def _norms(report: Report) -> None:
    x, w, dy = normal(512, 4096, seed=12), normal(4096, seed=13), normal(512, 4096, seed=14)

    def ordinary(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a, b = x.to(dtype).requires_grad_(), w.to(dtype)
        y = functional.rms_norm(a, (4096,), b, 1e-6)
        return y.detach(), torch.autograd.grad(y, a, dy.to(dtype))[0]

    y, rstd = pointwise.rmsnorm(x, w, 1e-6)
    ours = (y, pointwise.rmsnorm_backward(dy, x, w, rstd))
    pairs = zip(("forward", "backward"), ours, ordinary(torch.bfloat16), ordinary(torch.float64), strict=True)
    for name, found, theirs, exact in pairs:
        _compare(report, f"rmsnorm {name}", found, theirs, exact)


def _swiglu(report: Report) -> None:
    gate_up, dy = normal(512, 1, 2 * 1536, seed=15, scale=2), normal(512, 1, 1536, seed=16)

    def ordinary(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a = gate_up.to(dtype).requires_grad_()
        gate, up = a.chunk(2, 2)
        y = functional.silu(gate) * up
        return y.detach(), torch.autograd.grad(y, a, dy.to(dtype))[0]

    ours = (pointwise.swiglu(gate_up), pointwise.swiglu_backward(dy, gate_up))
    pairs = zip(("forward", "backward"), ours, ordinary(torch.bfloat16), ordinary(torch.float64), strict=True)
    for name, found, theirs, exact in pairs:
        _compare(report, f"swiglu {name}", found, theirs, exact)


def _probabilities(report: Report) -> None:
    vocab, rows = 151_936, 64
    logits, tokens = normal(rows, vocab, seed=17, scale=3), torch.arange(rows, device=DEVICE) * 2000
    params = RowParams.build([(0.7, 1.0, -1)] * rows, vocab).to(DEVICE)
    coefficients = torch.linspace(-1, 1, rows, device=DEVICE)
    temperature = torch.tensor(0.7, dtype=torch.float32, device=DEVICE)

    def ordinary(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a = logits.to(dtype).requires_grad_()
        logprob = (a / temperature.to(dtype)).log_softmax(1).gather(1, tokens[:, None])[:, 0]
        return logprob.detach(), torch.autograd.grad((logprob * coefficients.to(dtype)).sum(), a)[0]

    theirs, exact = ordinary(torch.float32), ordinary(torch.float64)
    _compare(report, "log-probability", policy.score_rows(logits, params, tokens)[0], theirs[0], exact[0])
    found = policy.score_backward(logits, params, tokens, coefficients)
    _compare(report, "log-probability backward", found, theirs[1].to(torch.bfloat16), exact[1])
