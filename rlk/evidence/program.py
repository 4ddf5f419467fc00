"""The operations of one pass through the model in the order in which they run: the order in which a probe looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kept = Literal["integer", "fp32"]


@dataclass(frozen=True)
class Op:
    """One recorded output. `sharded`: a fingerprint a virtual shard, else one a row, equal on every rank. `head`: its
    rows are those that predict a token, else every token of a sequence. `kept`: the value itself is recorded, a word a
    row, and not its fingerprint."""

    name: str
    sharded: bool
    head: bool = False
    kept: Kept | None = None


_FORWARD = {
    "input_norm": False, "qkv": True, "q_norm": True, "k_norm": True, "q_rope": True, "k_rope": True,
    "attention": True, "o_leaves": True, "o": False, "residual": False, "post_norm": False, "gate_up": True,
    "swiglu": True, "down_leaves": True, "down": False, "output": False,
}  # fmt: skip
_BACKWARD = {
    "d_swiglu": True, "d_gate_up": True, "d_post_norm": False, "d_residual": False, "d_attention": True,
    "d_q_rope": True, "d_k_rope": True, "d_v": True, "d_qkv": True, "d_input_norm": False, "d_input": False,
}  # fmt: skip


POLICY = (
    Op("policy_logits", sharded=False, head=True),
    Op("settings", sharded=False, head=True),
    Op("key", sharded=False, head=True),
    Op("token", sharded=False, head=True, kept="integer"),
    Op("kept_mass", sharded=False, head=True, kept="integer"),
    Op("logprob", sharded=False, head=True, kept="fp32"),
)
"""The steps of drawing and scoring a token: the logits, settings and generator key that the rule is given, the token,
the mass that is kept, the log-probability. Where nothing is drawn the key is the one that the plan gives."""


def forward(layers: int, *, native: bool = False) -> tuple[Op, ...]:
    """What a forward pass records. A leaf is one virtual shard's partial of a row-parallel product, before the tree;
    native operators have none, and a native sampler shows no steps."""
    kept = [(name, sharded) for name, sharded in _FORWARD.items() if not (native and name.endswith("_leaves"))]
    return (
        Op("embedding", sharded=False),
        *(Op(f"layers.{i}.{name}", sharded) for i in range(layers) for name, sharded in kept),
        Op("norm", sharded=False),
        Op("logits", sharded=True, head=True),
        Op("gathered_logits", sharded=False, head=True),
        *(() if native else POLICY),
    )


def backward(layers: int) -> tuple[Op, ...]:
    """What a canonical backward pass records: the gradient of each output, `d_` and its name."""
    return (
        Op("d_logits", sharded=True, head=True),
        Op("d_norm", sharded=False),
        Op("d_hidden", sharded=False),
        *(Op(f"layers.{i}.{name}", sharded) for i in reversed(range(layers)) for name, sharded in _BACKWARD.items()),
    )


FORWARD_PHASES = ("rollout", "score", "update")
"""Forward passes: of the engines, of the recomputed policy, and of the pass that is differentiated."""

PHASES = (*FORWARD_PHASES, "backward")
"""Phases that record rows, in the order of a step; the optimizer comes after them."""

STATES = ("grad", "master_in", "m_in", "v_in", "master_out", "m_out", "v_out")
"""Inputs and outputs of the optimizer, recorded an atom of every stored parameter."""


def program(phase: str, layers: int, *, native: bool = False) -> tuple[Op, ...]:
    """The ops of one of PHASES."""
    return backward(layers) if phase == "backward" else forward(layers, native=native)


def replicated(parameter: str) -> bool:
    """Whether every tensor-parallel rank keeps the whole of a stored parameter."""
    return parameter.endswith("norm")


def parameters(layers: int, *, tied: bool) -> Iterator[str]:
    """Stored parameters in name order of the model, as the optimizer keeps them."""
    yield "embed"
    for i in range(layers):
        for name in ("input_norm", "qkv", "q_norm", "k_norm", "o", "post_norm", "gate_up", "down"):
            yield f"layers.{i}.{name}"
    yield "norm"
    if not tied:
        yield "head"
