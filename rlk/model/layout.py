"""How parameters are stored, and how each stored shard maps to the tensors of a Hugging Face checkpoint.

A parallel parameter is stored as [S, rows, cols], S the virtual shards held here; a replicated one as [n].
Projections that read
the same input are one parameter: a shard of `qkv` is its rows of q, then k, then v, which is the order of the input
gradient's chain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlk.kernels.tree import VIRTUAL
from rlk.plan.profile import ModelShape

Axis = Literal["rows", "cols", "none"]
Kind = Literal["embedding", "norm", "qk_norm", "attention", "mlp", "head"]


@dataclass(frozen=True)
class Region:
    """What one stored shard holds of one checkpoint tensor: stored rows [start, start + rows) are its elements from
    (row0, col0)."""

    hf_name: str
    start: int
    rows: int
    cols: int
    row0: int
    col0: int


@dataclass(frozen=True)
class Tensor:
    """A checkpoint tensor and the axis that tensor parallelism cuts."""

    hf_name: str
    shape: tuple[int, ...]
    axis: Axis
    kind: Kind

    @property
    def width(self) -> int:
        """Columns of the whole tensor; a vector is one row."""
        return self.shape[-1]


@dataclass(frozen=True)
class Param:
    """A stored parameter: one or more checkpoint tensors, shard by shard. `padded` is the row count with padding,
    for vocabularies."""

    name: str
    tensors: tuple[Tensor, ...]
    padded: int | None = None

    @property
    def replicated(self) -> bool:
        """Held whole by every tensor-parallel rank."""
        return self.tensors[0].axis == "none"

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one virtual shard (of the whole, if replicated)."""
        first = self.tensors[0]
        if first.axis == "none":
            return first.shape
        if first.axis == "cols":
            return (first.shape[0], first.shape[1] // VIRTUAL)
        return (sum(self._rows(t) for t in self.tensors) // VIRTUAL, first.shape[1])

    def _rows(self, t: Tensor) -> int:
        return self.padded if self.padded is not None else t.shape[0]

    def regions(self, shard: int) -> Iterator[Region]:
        """The checkpoint regions of virtual shard `shard` (0 for a replicated parameter); padding belongs to none."""
        start = 0
        for t in self.tensors:
            if t.axis == "none":
                yield Region(t.hf_name, 0, 1, t.width, 0, 0)
            elif t.axis == "cols":
                cols = t.width // VIRTUAL
                yield Region(t.hf_name, 0, t.shape[0], cols, 0, shard * cols)
            else:
                rows = self._rows(t) // VIRTUAL
                row0 = shard * rows
                yield Region(t.hf_name, start, max(0, min(rows, t.shape[0] - row0)), t.width, row0, 0)
                start += rows


def parameters(shape: ModelShape) -> tuple[Param, ...]:
    """Every stored parameter of a Qwen3 of this shape, in name order within each layer."""
    hidden, d = shape.hidden, shape.head_dim
    q, kv, f = shape.heads * d, shape.kv_heads * d, shape.intermediate

    def whole(name: str, hf: str, n: int, kind: Kind) -> Param:
        return Param(name, (Tensor(f"{hf}.weight", (n,), "none", kind),))

    def vocabulary(name: str, hf: str, kind: Kind) -> Param:
        return Param(name, (Tensor(f"{hf}.weight", (shape.vocab_size, hidden), "rows", kind),), shape.padded_vocab)

    out = [vocabulary("embed", "model.embed_tokens", "embedding")]
    for i in range(shape.layers):
        hf, name = f"model.layers.{i}", f"layers.{i}"

        def cut(hf_name: str, rows: int, cols: int, axis: Axis, kind: Kind, hf: str = hf) -> Tensor:
            return Tensor(f"{hf}.{hf_name}.weight", (rows, cols), axis, kind)

        out += [
            whole(f"{name}.input_norm", f"{hf}.input_layernorm", hidden, "norm"),
            Param(
                f"{name}.qkv",
                tuple(
                    cut(f"self_attn.{x}_proj", n, hidden, "rows", "attention")
                    for x, n in (("q", q), ("k", kv), ("v", kv))
                ),
            ),
            whole(f"{name}.q_norm", f"{hf}.self_attn.q_norm", d, "qk_norm"),
            whole(f"{name}.k_norm", f"{hf}.self_attn.k_norm", d, "qk_norm"),
            Param(f"{name}.o", (cut("self_attn.o_proj", hidden, q, "cols", "attention"),)),
            whole(f"{name}.post_norm", f"{hf}.post_attention_layernorm", hidden, "norm"),
            Param(f"{name}.gate_up", tuple(cut(f"mlp.{x}_proj", f, hidden, "rows", "mlp") for x in ("gate", "up"))),
            Param(f"{name}.down", (cut("mlp.down_proj", hidden, f, "cols", "mlp"),)),
        ]
    out.append(whole("norm", "model.norm", hidden, "norm"))
    if not shape.tie_word_embeddings:
        out.append(vocabulary("head", "lm_head", "head"))
    return tuple(out)


def stored_bytes(shape: ModelShape) -> int:
    """Bytes of all parameters, bf16, padding included."""
    shards = {True: 1, False: VIRTUAL}
    return 2 * sum(math.prod(p.shard_shape) * shards[p.replicated] for p in parameters(shape))
