"""The start-up proof: before its first step a process runs every kernel it will use against the plain chain.

Each probe is order-sensitive: another order of the same sum must give another result, or the probe proves nothing
and is refused. A difference stops the run with the kernel's name. What a chain is made of belongs to the device (see
rlk.kernels.gemm), so each form brings its own definition of it, written as plainly as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlk.kernels import attention_proof, gemm, pointwise, policy, product_proof
from rlk.kernels.attention_proof import AttentionShape
from rlk.kernels.forms import form
from rlk.kernels.product_proof import Product
from rlk.kernels.requirement import ProofError, require
from rlk.kernels.tree import VIRTUAL, tree_sum

__all__ = ["AttentionShape", "Product", "Proof", "ProofError", "prove"]


@dataclass(frozen=True)
class Proof:
    """One kernel choice and the sentence that says how it was proved."""

    name: str
    form: str
    sentence: str


def prove(
    device: torch.device, products: Sequence[Product] = (), shape: AttentionShape | None = None
) -> tuple[Proof, ...]:
    """Runs all probes on `device`.

    products: the weights that this process multiplies with. A library picks its kernel by size, so what holds for one
    says little of another; on a CPU, where the order is written out, none need be given. shape: the heads of the model
    and the page of its cache, which CUDA programs are compiled for.

    Raises:
        ProofError: names the kernel.
    """
    probes: dict[str, tuple[str, Callable[[torch.device], str]]] = {
        "gemm": ("gemm", lambda d: "; ".join([_gemm(d), *product_proof.check(products, d)])),
        "tree": ("gemm", _tree),
        "rmsnorm": ("pointwise", _rmsnorm),
        "attention": ("attention", lambda d: attention_proof.check(shape or AttentionShape(), d, _probe_rows)),
        "policy": ("policy", _policy),
    }
    here = torch.empty(0, device=device)
    return tuple(Proof(name, form(op, here).describe(), probe(device)) for name, (op, probe) in probes.items())


def _probe_rows(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """bf16 values of widely different size, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(20)
    sizes = torch.randn(rows, columns, generator=generator).mul(2).exp()
    return (torch.randn(rows, columns, generator=generator) * sizes).to(torch.bfloat16).to(device)


def plain_chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[M, N] fp32 of x [M, K] and w [N, K]: one accumulator an element, k ascending, as the form defines it."""
    chain: torch.Tensor = form("gemm", x).plain_chain(x, w)
    return chain


def _gemm(device: torch.device) -> str:
    # On a CPU the columns that fill no vector must be reached; a library picks its kernel by size, so there a weight of
    # a small model stands for all that come later (product_proof).
    n, k, columns = (83, 96, (83, 64, 17, 1)) if device.type == "cpu" else (512, 1024, (512, 256))
    x, w = _probe_rows(13, k, device), _probe_rows(n, k, device)
    expected = plain_chain(x, w)
    moved = int((plain_chain(x.flip(1), w.flip(1)) != expected).sum())
    require(moved > 0, "gemm", "the probe is not sensitive to order")
    prepared = gemm.prepare(w)
    for m in (1, 2, 3, 6, 7, 8, 13):
        for width in columns:
            found = gemm.leaf(x[:m], prepared[:, :width])
            same = torch.equal(found, expected[:m, :width])
            require(same, "gemm", f"differs from the plain chain at M {m}, N {width}")
    dy = _probe_rows(7, n, device)
    dx = plain_chain(dy, w.t().contiguous())
    require(torch.equal(gemm.input_gradient(dy, w), dx), "gemm", "its input gradient is not the plain chain")
    half = gemm.input_gradient(dy[:, 48:], w[48:], gemm.input_gradient(dy[:, :48], w[:48]))
    require(torch.equal(half, dx), "gemm", "a continued chain is not the whole one")
    dw = plain_chain(dy.t().contiguous(), x[:7].t().contiguous())
    require(torch.equal(gemm.weight_gradient(dy, x[:7]), dw), "gemm", "its weight gradient is not the plain chain")
    share = f"{moved} of {expected.numel()}"
    return f"equal to the plain chain at M 1 to 13 and N up to {n}; {share} elements move with order"


def _tree(device: torch.device) -> str:
    leaves = _probe_rows(VIRTUAL, 512, device).float() * _probe_rows(512, VIRTUAL, device).t().float()
    a = [leaves[i] for i in range(VIRTUAL)]
    expected = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
    chain = a[0]
    for leaf in a[1:]:
        chain = chain + leaf
    moved = int((chain != expected).sum())
    require(moved > 0, "tree", "the probe is not sensitive to order")
    for size in (1, 2, 4, 8):
        ranks = torch.stack([tree_sum(part) for part in leaves.chunk(size)])
        require(torch.equal(tree_sum(ranks), expected), "tree", f"differs when {size} ranks hold the leaves")
    product_proof.check_trees(_probe_rows, device)
    return f"equal for 1, 2, 4 and 8 holders of the leaves; {moved} of 512 elements differ from left to right"


def _rmsnorm(device: torch.device) -> str:
    for columns in (144, 1040):  # a device may cut short and long rows in different ways
        _rmsnorm_rows(columns, device)
    return "rows reduced in 16 interleaved chains and a tree; each row the same alone"


def _rmsnorm_rows(columns: int, device: torch.device) -> None:
    x, w = _probe_rows(9, columns, device), _probe_rows(1, columns, device)[0]
    y, rstd = pointwise.rmsnorm(x, w, 1e-6)
    squares = x.float() * x.float()
    lanes = torch.zeros(9, 16, device=device)
    for i in range(0, columns, 16):
        lanes = lanes + squares[:, i : i + 16]
    total = tree_sum(lanes.t())
    chain = torch.zeros(9, device=device)
    for i in range(columns):
        chain = chain + squares[:, i]
    require(not torch.equal(total, chain), "rmsnorm", "the probe is not sensitive to order")
    mean = total / torch.tensor(float(columns), device=device) + torch.tensor(1e-6, device=device)
    expected = 1.0 / mean.double().sqrt().float()  # torch's fp32 sqrt is not correctly rounded on every CPU
    require(torch.equal(rstd, expected), "rmsnorm", "does not reduce a row in its declared order")
    for r in range(9):
        alone, _ = pointwise.rmsnorm(x[r : r + 1], w, 1e-6)
        require(torch.equal(alone, y[r : r + 1]), "rmsnorm", "a row depends on others")


def _policy(device: torch.device) -> str:
    logits = _probe_rows(4, 300, device).clamp(-30, 30)
    settings = [(0.7, 0.9, -1), (1.3, 1.0, 20), (0.0, 1.0, -1), (1.0, 1.0, -1)]
    params = policy.RowParams.build(settings, 300).to(device)
    ids = torch.arange(4, device=device)
    token, logprob = policy.sample_rows(logits, params, ids + 5, ids, ids + 9)
    again, inside, _ = policy.score_rows(logits, params, token)
    require(torch.equal(logprob, again) and bool(inside.all()), "policy", "scoring differs from sampling")
    for r in range(4):
        one = ids[r : r + 1]
        alone = policy.sample_rows(logits[one], params.rows(one), one + 5, one, one + 9)
        same = torch.equal(alone[0], token[one]) and torch.equal(alone[1], logprob[one])
        require(same, "policy", "a row depends on others")
    return "sampling and scoring agree bit by bit; each row the same alone; sums are integers"
