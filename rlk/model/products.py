"""The matrix products of one rank's part of a model, and its attention: what the start-up proof must try."""

from __future__ import annotations

from rlk.kernels.proof import AttentionShape, Product
from rlk.kernels.tree import VIRTUAL
from rlk.plan.shape import ModelShape


def products(shape: ModelShape, tp: int, *, rows: int, head_rows: int, backward: bool) -> tuple[Product, ...]:
    """Every weight as a rank of tensor-parallel degree `tp` holds it.

    rows, head_rows: the most rows of a step, and the most that logits are computed of.
    """
    shards, hidden = VIRTUAL // tp, shape.hidden
    q, kv, f = (
        n // VIRTUAL for n in (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate)
    )
    return (
        Product("qkv", shards, q + 2 * kv, hidden, False, rows, backward),
        Product("o", shards, hidden, q, True, rows, backward),
        Product("gate_up", shards, 2 * f, hidden, False, rows, backward),
        Product("down", shards, hidden, f, True, rows, backward),
        Product("head", shards, shape.padded_vocab // VIRTUAL, hidden, False, head_rows, backward),
    )


def attention_shape(shape: ModelShape, tp: int, page: int) -> AttentionShape:
    """The heads of a rank, and the rows of a page of its cache."""
    return AttentionShape(shape.heads // tp, shape.kv_heads // tp, shape.head_dim, page)
