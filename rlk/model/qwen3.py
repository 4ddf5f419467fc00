"""Qwen3, defined once. The trainer and the rollout engine differ in the attention core and in the parallel context
they pass in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rlk.kernels import pointwise
from rlk.model.checkpoint import HOST, empty_stored
from rlk.model.layout import parameters
from rlk.model.ops import Ops
from rlk.model.parallel import ParallelContext
from rlk.plan.profile import ModelShape

# layer, q [T, H, D], k [T, HK, D], v [T, HK, D] -> [T, H, D], all bf16
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class LayerTape:
    """What one layer's backward pass reads. Raw q and k are before their norms; `a` is the attention output."""

    x: torch.Tensor
    rstd1: torch.Tensor
    h1: torch.Tensor
    q_raw: torch.Tensor
    q_rstd: torch.Tensor
    k_raw: torch.Tensor
    k_rstd: torch.Tensor
    a: torch.Tensor
    x2: torch.Tensor
    rstd2: torch.Tensor
    h2: torch.Tensor
    gate_up: torch.Tensor
    act: torch.Tensor


@dataclass
class Tape:
    """Activations of one forward pass, for the trainer's backward pass."""

    layers: list[LayerTape]
    x: torch.Tensor | None = None
    rstd: torch.Tensor | None = None


class Qwen3:
    """One rank's part of the model (Qwen3 technical report, 2025): weights stored per virtual shard, see
    rlk.model.layout."""

    def __init__(
        self,
        shape: ModelShape,
        context: ParallelContext,
        ops: Ops,
        max_positions: int,
        weights: dict[str, torch.Tensor] | None = None,
        device: torch.device = HOST,
    ) -> None:
        """Without `weights` (stored parameters on `device` by name, held, not copied) the model starts as zeros: see
        `load`."""
        self.shape, self.context, self.ops = shape, context, ops
        self.params = parameters(shape)
        self.device = device
        self.weights = {p.name: empty_stored(p, context, device) for p in self.params} if weights is None else weights
        tables = pointwise.rope_tables(shape.rope_theta, shape.head_dim, max_positions)
        self.cos, self.sin = (table.to(device) for table in tables)
        self._prepared: dict[str, torch.Tensor] = {}

    @property
    def head_name(self) -> str:
        """The parameter behind the logits."""
        return "embed" if self.shape.tie_word_embeddings else "head"

    def load(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Writes parameters in place and renews what was derived from them: the one place where weights change.

        Raises:
            ValueError: a name the model does not have, or another shape or dtype.
        """
        for name, value in stored.items():
            if name not in self.weights:
                raise ValueError(f"{name}: not a parameter of this model; allowed are the names of rlk.model.layout")
            held = self.weights[name]
            if value.shape != held.shape or value.dtype != held.dtype:
                raise ValueError(
                    f"{name}: got {value.dtype} {tuple(value.shape)}, allowed is {held.dtype} {tuple(held.shape)}"
                )
            held.copy_(value)
            if held.dim() == 3:
                self._prepared.pop(name, None)

    def forget_prepared(self) -> None:
        """Drops what was made from the weights, which may be views that keep their memory."""
        self._prepared.clear()

    def prepared(self, name: str) -> torch.Tensor:
        """A weight as the device multiplies with it, made on first use after a write."""
        if name not in self._prepared:
            row_parallel = name.endswith((".o", ".down"))
            prepare = self.ops.prepare_row if row_parallel else self.ops.prepare_column
            self._prepared[name] = prepare(self.weights[name])
        return self._prepared[name]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, tape: Tape | None = None
    ) -> torch.Tensor:
        """Final normed hidden states [T, hidden] bf16 of ids int64 [T] at absolute positions int64 [T]."""
        x = self.ops.embed(self.weights["embed"], ids, self.context.tp)
        for i in range(self.shape.layers):
            x = self._layer(i, x, positions, attend, tape)
        hidden, rstd = self.ops.rmsnorm(x, self.weights["norm"], self.shape.rms_eps)
        if tape is not None:
            tape.x, tape.rstd = x, rstd
        return hidden

    def _layer(
        self, i: int, x: torch.Tensor, positions: torch.Tensor, attend: Attend, tape: Tape | None
    ) -> torch.Tensor:
        ops, w, eps, tp = self.ops, self.weights, self.shape.rms_eps, self.context.tp
        name = f"layers.{i}"
        h1, rstd1 = ops.rmsnorm(x, w[f"{name}.input_norm"], eps)
        q_raw, k_raw, v = self.split_qkv(self._by_shard(ops.column(h1, self.prepared(f"{name}.qkv"), tp)))
        qn, q_rstd = ops.rmsnorm(q_raw, w[f"{name}.q_norm"], eps)
        kn, k_rstd = ops.rmsnorm(k_raw, w[f"{name}.k_norm"], eps)
        q, k = (ops.rope(y, self.cos, self.sin, positions) for y in (qn, kn))
        a = attend(i, q, k, v)
        o = ops.row(self._by_shard(a.flatten(1)), self.prepared(f"{name}.o"), tp, f"{name}.o")
        x2 = ops.add(x, o)
        h2, rstd2 = ops.rmsnorm(x2, w[f"{name}.post_norm"], eps)
        gate_up = self._by_shard(ops.column(h2, self.prepared(f"{name}.gate_up"), tp))
        act = ops.swiglu(gate_up)
        down = ops.row(act, self.prepared(f"{name}.down"), tp, f"{name}.down")
        if tape is not None:
            tape.layers.append(LayerTape(x, rstd1, h1, q_raw, q_rstd, k_raw, k_rstd, a, x2, rstd2, h2, gate_up, act))
        return ops.add(x2, down)

    def _by_shard(self, x: torch.Tensor) -> torch.Tensor:
        """[T, S * n] to [T, S, n]: the columns of each virtual shard held here."""
        cut: torch.Tensor = x.unflatten(1, (len(self.context.shards), -1))
        return cut

    def split_qkv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, S, q | k | v rows of a shard] to q [T, H, D], k and v [T, HK, D], heads of adjacent shards side by
        side."""
        d, group = self.shape.head_dim, self.shape.heads // self.shape.kv_heads
        kv = qkv.shape[2] // (group + 2)
        q, k, v = (x.flatten(1).unflatten(1, (-1, d)).contiguous() for x in qkv.split([group * kv, kv, kv], 2))
        return q, k, v

    def join_qkv(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The inverse of split_qkv."""
        shards = len(self.context.shards)
        return torch.cat([x.unflatten(1, (shards, -1)).flatten(2) for x in (q, k, v)], 2)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocabulary] bf16 over the real vocabulary, on every rank: padded columns are left out by index."""
        local = self.ops.column(hidden, self.prepared(self.head_name), self.context.tp)
        full = self.ops.gather_columns(local, self.context.tp)
        return full[:, : self.shape.vocab_size].contiguous()
