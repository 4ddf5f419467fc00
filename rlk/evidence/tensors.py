"""The tensors that an export of a Qwen3 model must hold: Hugging Face names, full shapes, kinds."""

from __future__ import annotations

from collections.abc import Iterator

from rlk.evidence.schemas import TensorEntry
from rlk.evidence.settings import DTYPE
from rlk.plan.shape import ModelShape


def expected_tensors(shape: ModelShape) -> tuple[TensorEntry, ...]:
    """Every exported tensor by name. The vocabulary has its real rows; a tied head is not exported twice."""
    found = [TensorEntry(name="model.embed_tokens.weight", shape=_vocabulary(shape), dtype=DTYPE, kind="embedding")]
    for layer in range(shape.layers):
        found += _layer(shape, f"model.layers.{layer}")
    found.append(TensorEntry(name="model.norm.weight", shape=(shape.hidden,), dtype=DTYPE, kind="norm"))
    if not shape.tie_word_embeddings:
        found.append(TensorEntry(name="lm_head.weight", shape=_vocabulary(shape), dtype=DTYPE, kind="head"))
    return tuple(sorted(found, key=lambda entry: entry.name))


def _vocabulary(shape: ModelShape) -> tuple[int, int]:
    return shape.vocab_size, shape.hidden


def _layer(shape: ModelShape, prefix: str) -> Iterator[TensorEntry]:
    queries, values = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield TensorEntry(name=f"{prefix}.{name}.weight", shape=(shape.hidden,), dtype=DTYPE, kind="norm")
    for name in ("q_norm", "k_norm"):
        full = f"{prefix}.self_attn.{name}.weight"
        yield TensorEntry(name=full, shape=(shape.head_dim,), dtype=DTYPE, kind="qk_norm")
    for name, rows, columns in (
        ("q_proj", queries, shape.hidden),
        ("k_proj", values, shape.hidden),
        ("v_proj", values, shape.hidden),
        ("o_proj", shape.hidden, queries),
    ):
        full = f"{prefix}.self_attn.{name}.weight"
        yield TensorEntry(name=full, shape=(rows, columns), dtype=DTYPE, kind="attention")
    for name, rows, columns in (
        ("gate_proj", shape.intermediate, shape.hidden),
        ("up_proj", shape.intermediate, shape.hidden),
        ("down_proj", shape.hidden, shape.intermediate),
    ):
        yield TensorEntry(name=f"{prefix}.mlp.{name}.weight", shape=(rows, columns), dtype=DTYPE, kind="mlp")
