"""The start-up proof: before its first step a process runs every kernel it will use against the plain chain.

Each probe is order-sensitive: another order of the same sum must give another result, or the probe proves nothing
and is refused. A difference stops the run with the kernel's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlk.kernels import attention, gemm, pointwise, policy
from rlk.kernels.tree import VIRTUAL, tree_sum


class ProofError(RuntimeError):
    """A kernel does not follow the declared order, or a probe cannot tell."""


@dataclass(frozen=True)
class Proof:
    """One kernel choice and the sentence that says how it was proved."""

    name: str
    form: str
    sentence: str


def prove(device: torch.device) -> tuple[Proof, ...]:
    """Runs all probes on `device`.

    Raises:
        ProofError: names the kernel.
    """
    form = f"{device.type}: fixed loop order in C++" if device.type == "cpu" else device.type
    probes: dict[str, Callable[[torch.device], str]] = {
        "gemm": _gemm, "tree": _tree, "rmsnorm": _rmsnorm, "attention": _attention, "policy": _policy,
    }  # fmt: skip
    return tuple(Proof(name, form, probe(device)) for name, probe in probes.items())


def _require(good: bool, kernel: str, what: str) -> None:
    if not good:
        raise ProofError(f"kernel {kernel}: {what}; this machine cannot run the canonical program with it")


def _probe_rows(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """bf16 values of widely different size, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(20)
    sizes = torch.randn(rows, columns, generator=generator).mul(2).exp()
    return (torch.randn(rows, columns, generator=generator) * sizes).to(torch.bfloat16).to(device)


def plain_chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[M, N] fp32 of x [M, K] and w [N, K]: one accumulator an element, k ascending, in single torch operations."""
    total = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    for k in range(x.shape[1]):
        total = total + x[:, k, None].float() * w[None, :, k].float()
    return total


def _gemm(device: torch.device) -> str:
    x, w = _probe_rows(13, 96, device), _probe_rows(83, 96, device)
    expected = plain_chain(x, w)
    moved = int((plain_chain(x.flip(1), w.flip(1)) != expected).sum())
    _require(moved > 0, "gemm", "the probe is not sensitive to order")
    prepared = gemm.prepare(w)
    for m in (1, 2, 3, 6, 7, 8, 13):
        for n in (83, 64, 17, 1):
            found = gemm.leaf(x[:m], prepared[:, :n])
            _require(torch.equal(found, expected[:m, :n]), "gemm", f"differs from the plain chain at M {m}, N {n}")
    dy = _probe_rows(7, 83, device)
    dx = plain_chain(dy, w.t().contiguous())
    _require(torch.equal(gemm.input_gradient(dy, w), dx), "gemm", "its input gradient is not the plain chain")
    half = gemm.input_gradient(dy[:, 40:], w[40:], gemm.input_gradient(dy[:, :40], w[:40]))
    _require(torch.equal(half, dx), "gemm", "a continued chain is not the whole one")
    dw = plain_chain(dy.t().contiguous(), x[:7].t().contiguous())
    _require(torch.equal(gemm.weight_gradient(dy, x[:7]), dw), "gemm", "its weight gradient is not the plain chain")
    share = f"{moved} of {expected.numel()}"
    return f"equal to the plain chain at M 1 to 13 and N 1 to 83; {share} elements move with order"


def _tree(device: torch.device) -> str:
    leaves = _probe_rows(VIRTUAL, 512, device).float() * _probe_rows(512, VIRTUAL, device).t().float()
    a = [leaves[i] for i in range(VIRTUAL)]
    expected = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
    chain = a[0]
    for leaf in a[1:]:
        chain = chain + leaf
    moved = int((chain != expected).sum())
    _require(moved > 0, "tree", "the probe is not sensitive to order")
    for size in (1, 2, 4, 8):
        ranks = torch.stack([tree_sum(part) for part in leaves.chunk(size)])
        _require(torch.equal(tree_sum(ranks), expected), "tree", f"differs when {size} ranks hold the leaves")
    return f"equal for 1, 2, 4 and 8 holders of the leaves; {moved} of 512 elements differ from left to right"


def _rmsnorm(device: torch.device) -> str:
    x, w = _probe_rows(9, 144, device), _probe_rows(1, 144, device)[0]
    y, rstd = pointwise.rmsnorm(x, w, 1e-6)
    squares = x.float() * x.float()
    lanes = torch.zeros(9, 16, device=device)
    for i in range(0, 144, 16):
        lanes = lanes + squares[:, i : i + 16]
    total = tree_sum(lanes.t())
    chain = torch.zeros(9, device=device)
    for i in range(144):
        chain = chain + squares[:, i]
    _require(not torch.equal(total, chain), "rmsnorm", "the probe is not sensitive to order")
    mean = total / torch.tensor(144.0, device=device) + torch.tensor(1e-6, device=device)
    expected = 1.0 / mean.double().sqrt().float()  # torch's fp32 sqrt is not correctly rounded on every CPU
    _require(torch.equal(rstd, expected), "rmsnorm", "does not reduce a row in its declared order")
    for r in range(9):
        alone, _ = pointwise.rmsnorm(x[r : r + 1], w, 1e-6)
        _require(torch.equal(alone, y[r : r + 1]), "rmsnorm", "a row depends on others")
    return "rows reduced in 16 interleaved chains and a tree; each row the same alone"


def _attention(device: torch.device) -> str:
    lengths, heads, kv_heads, d, block = (1, 63, 130), 4, 2, 16, 16
    total = sum(lengths)
    q = _probe_rows(total, heads * d, device).mul(0.25).view(total, heads, d)
    k, v = _probe_rows(2 * total, kv_heads * d, device).mul(0.25).view(2, total, kv_heads, d)
    first = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    expected, _ = attention.packed(q, k, v, positions, first, first)
    pages = [-(-n // block) for n in lengths]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=device)
    order = list(range(1, sum(pages) + 1))[::-1]  # pages in descending memory order
    for i, n in enumerate(pages):
        table[i, :n] = torch.tensor([order.pop(0) for _ in range(n)])
    cache = torch.full((sum(pages) + 1, kv_heads, block, 2 * d), float("nan"), dtype=torch.bfloat16, device=device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    attention.write_pages(k, v, cache, table[owner, positions // block].long() * block + positions % block)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    found = attention.paged(q, cache, table, first.int(), seq_lens)
    _require(torch.equal(found, expected), "attention", "paged differs from packed")
    last = first[1:] - 1
    one_each = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    decoded = attention.paged(q[last].contiguous(), cache, table, one_each, seq_lens)
    _require(torch.equal(decoded, expected[last]), "attention", "decoding a row differs from prefilling it")
    back = torch.flip(k, (0,))
    moved = attention.packed(q, back, torch.flip(v, (0,)), positions, first, first)[0]
    _require(not torch.equal(moved, expected), "attention", "the probe is not sensitive to order")
    return "packed, paged and single-row decode agree on sequences of 1, 63 and 130 tokens"


def _policy(device: torch.device) -> str:
    logits = _probe_rows(4, 300, device).clamp(-30, 30)
    params = policy.RowParams.build([(0.7, 0.9, -1), (1.3, 1.0, 20), (0.0, 1.0, -1), (1.0, 1.0, -1)], 300)
    ids = torch.arange(4, device=device)
    token, logprob = policy.sample_rows(logits, params, ids + 5, ids, ids + 9)
    again, inside, _ = policy.score_rows(logits, params, token)
    _require(torch.equal(logprob, again) and bool(inside.all()), "policy", "scoring differs from sampling")
    for r in range(4):
        one = ids[r : r + 1]
        alone = policy.sample_rows(logits[one], params.rows(one), one + 5, one, one + 9)
        same = torch.equal(alone[0], token[one]) and torch.equal(alone[1], logprob[one])
        _require(same, "policy", "a row depends on others")
    return "sampling and scoring agree bit by bit; each row the same alone; sums are integers"
