"""Faults in what both engines compute with: operators, and the policy that samples and scores. See rlk.plan.faults.

Nothing here is reached unless a fault was asked for: the owner of a model passes the faulty operators or policy in
where it would pass the canonical ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rlk.kernels import gemm, pointwise, policy
from rlk.kernels.collectives.base import Collective
from rlk.kernels.policy import RowParams
from rlk.kernels.tree import tree_sum
from rlk.model.ops import CanonicalOps, Ops
from rlk.model.policy import Policy
from rlk.plan.faults import Moment, Side, moment

_WRONG_BASE = 1e4
_OUT = -1e4  # a logit that no support keeps


def ops_for(inject: str | None, *sides: Side) -> tuple[Ops, Moment | None]:
    """The operators of a model on one of these sides, and the moment that its owner must keep up to date."""
    when = moment(inject, ("ops",), sides)
    return (CanonicalOps(), None) if when is None else (FaultyOps(when), when)


def policy_for(inject: str | None, *sides: Side, inner: Policy = policy) -> tuple[Policy, Moment | None]:
    """As `ops_for`, the policy; `inner` is what computes."""
    when = moment(inject, ("policy",), sides)
    return (inner, None) if when is None else (FaultyPolicy(when, inner), when)


class FaultyOps(CanonicalOps):
    """The canonical operators with one of them wrong while the fault acts."""

    def __init__(self, when: Moment) -> None:
        self.when, self.fault = when, when.injection.fault.name.removesuffix("-both")
        self._dimensions = 2  # of the rows that were normed last

    def _acts(self, name: str) -> bool:
        return self.fault == name and self.when.on

    def column(self, x: torch.Tensor, w: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops."""
        if not self._acts("split-k"):
            return super().column(x, w, tp)
        first, second = x.clone(), x.clone()
        first[:, x.shape[1] // 2 :] = 0
        second[:, : x.shape[1] // 2] = 0
        return gemm.round_bf16(gemm.leaf(first, w) + gemm.leaf(second, w))

    def row(self, x: torch.Tensor, w: torch.Tensor, tp: Collective, stage: str) -> torch.Tensor:
        """See Ops."""
        return self.join(self.leaves(x, w), tp, stage)

    def join(self, leaves: torch.Tensor, tp: Collective, stage: str) -> torch.Tensor:
        """See CanonicalOps."""
        if self._acts("shard-dropped") and tp.rank == 0:
            leaves = torch.cat([torch.zeros_like(leaves[:1]), leaves[1:]])
        if self._acts("left-to-right"):
            total = torch.zeros_like(leaves[0])
            for leaf in tp.all_gather(leaves, stage).flatten(0, 1):
                total = total + leaf
            return gemm.round_bf16(total)
        if self._acts("partials-bf16"):
            return gemm.round_bf16(tree_sum(tp.all_gather(tree_sum(leaves).bfloat16().float(), stage)))
        return super().join(leaves, tp, stage)

    def rmsnorm(self, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        y, rstd = super().rmsnorm(x, w, eps)
        # Queries are the only rows of three dimensions that come after rows of two.
        queries, self._dimensions = x.dim() == 3 and self._dimensions == 2, x.dim()
        return (x.clone(), rstd) if queries and self._acts("no-q-norm") else (y, rstd)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        if self._acts("rope-bf16"):
            cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
        if self._acts("rope-base"):
            cos, sin = pointwise.rope_tables(_WRONG_BASE, 2 * cos.shape[1], cos.shape[0])
        return super().rope(x, cos, sin, positions)

    def gather_columns(self, x: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops."""
        y = super().gather_columns(x, tp)
        if self._acts("logit-ulp"):
            return _flipped(y)
        if not self._acts("ranks-swapped"):
            return y
        n = x.shape[1]
        return torch.cat([y[:, n : 2 * n], y[:, :n], y[:, 2 * n :]], 1)


class FaultyPolicy:
    """The canonical policy with one rule wrong while the fault acts. Gradients follow the faulty rule."""

    def __init__(self, when: Moment, inner: Policy = policy) -> None:
        self.when, self.fault = when, when.injection.fault.name.removesuffix("-both")
        self.inner = inner

    def sample_rows(
        self,
        logits: torch.Tensor,
        params: RowParams,
        seed: torch.Tensor,
        sample_id: torch.Tensor,
        position: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Policy."""
        if self.when.on and self.fault == "wrong-key":
            seed = seed + 1
        logits, params = self._rule(logits, params)
        tokens, _ = self.inner.sample_rows(logits, params, seed, sample_id, position)
        return tokens, self._logprob(logits, params, tokens)

    def score_rows(
        self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Policy."""
        logits, params = self._rule(logits, params)
        _, inside, mass = self.inner.score_rows(logits, params, tokens)
        return self._logprob(logits, params, tokens), inside, mass

    def score_backward(
        self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """See Policy."""
        return self.inner.score_backward(*self._rule(logits, params), tokens, coefficients)

    def _rule(self, logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, RowParams]:
        """Logits and settings as the faulty rule sees them."""
        if not self.when.on:
            return logits, params
        if self.fault == "temperature-twice":
            return (logits.float() / params.temperature[:, None]).bfloat16(), params
        if self.fault == "no-truncation":
            return logits, params.full_support()
        if self.fault == "top-p-first":
            return _nucleus(logits, params), replace(params, top_p=torch.ones_like(params.top_p))
        if self.fault == "ties-kept":
            return logits, _with_ties(logits, params)
        return logits, params

    def _logprob(self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor) -> torch.Tensor:
        if self.when.on and self.fault == "padded-columns":
            padding = logits.new_zeros(logits.shape[0], -logits.shape[1] % 1024)
            logits = torch.cat([logits, padding], 1)
            off = params.top_k >= logits.shape[1] - padding.shape[1]  # and stays off over the longer row
            top_k = torch.where(off, torch.iinfo(torch.int64).max, params.top_k)
            params = replace(params, top_k=top_k)
        if self.when.on and self.fault in ("raw-logprobs", "temperature-on-logprobs"):
            full = params.full_support()
            plain = replace(full, temperature=torch.ones_like(full.temperature))
            raw = self.inner.score_rows(logits, plain, tokens)[0]
            return raw / params.temperature if self.fault == "temperature-on-logprobs" else raw
        return self.inner.score_rows(logits, params, tokens)[0]


def _flipped(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, one ulp off."""
    words = logits.view(torch.int16).clone()
    at = logits.float().argmax(1, keepdim=True)
    words.scatter_(1, at, words.gather(1, at) ^ 1)
    return words.view(torch.bfloat16)


def _nucleus(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Logits with everything outside the nucleus of the whole row pushed out."""
    share = (logits.double() / params.temperature[:, None].double()).softmax(1)
    ordered, order = share.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    kept = torch.zeros_like(share, dtype=torch.bool).scatter(1, order, before < params.top_p[:, None])
    return logits.masked_fill(~kept, _OUT)


def _with_ties(logits: torch.Tensor, params: RowParams) -> RowParams:
    """Top-k widened to every token as large as the k-th."""
    k = params.top_k.clamp(max=logits.shape[1])
    kth = logits.float().sort(1, descending=True)[0].gather(1, k[:, None] - 1)
    wider = (logits.float() >= kth).sum(1)
    return replace(params, top_k=torch.maximum(params.top_k, wider))
