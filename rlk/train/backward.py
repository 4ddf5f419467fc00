"""The canonical backward pass, written out: autograd would choose the order of sums, and the order is the product."""

from __future__ import annotations

import torch

from rlk.kernels import gemm, pointwise
from rlk.kernels.collectives.base import tree_all_reduce
from rlk.kernels.tree import tree_sum
from rlk.model.probe import Recorder
from rlk.model.qwen3 import LayerTape, Qwen3, Tape
from rlk.train.attention import PackedAttention
from rlk.train.batching import MicroBatch
from rlk.train.gradients import TIED_HEAD, Accumulators


class Backward:
    """Gradients of one micro-batch into the accumulators. T rows, S virtual shards held here."""

    def __init__(
        self,
        model: Qwen3,
        batch: MicroBatch,
        tape: Tape,
        core: PackedAttention,
        sums: Accumulators,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.batch, self.tape, self.core, self.sums = model, batch, tape, core, sums
        self.tp, self.recorder = model.context.tp, recorder

    def run(self, hidden: torch.Tensor, dlogits: torch.Tensor) -> None:
        """hidden [T, hidden] is the forward pass's result; dlogits [R, vocabulary] bf16 belongs to rows batch.rows."""
        m, tape = self.model, self.tape
        assert tape.x is not None
        assert tape.rstd is not None
        local = self._local_columns(dlogits)
        dhidden = torch.zeros_like(hidden)
        dhidden[self.batch.rows] = self._column_input(local, m.weights[m.head_name], "head")
        self._head_weight(local, hidden)
        dx = pointwise.rmsnorm_backward(dhidden, tape.x, m.weights["norm"], tape.rstd)
        self._note("d_", logits=local, norm=dhidden, hidden=dx)
        self._norm_gain("norm", dhidden, tape.x, tape.rstd)
        for i in reversed(range(m.shape.layers)):
            dx = self._layer(i, tape.layers[i], dx)
        self._embedding(dx)

    def _layer(self, i: int, t: LayerTape, dx: torch.Tensor) -> torch.Tensor:
        name, w = f"layers.{i}", self.model.weights
        dact = gemm.row_inputs(dx, w[f"{name}.down"])
        self._row_weight(f"{name}.down", dx, t.act)
        dgate_up = pointwise.swiglu_backward(dact, t.gate_up)
        self._column_weight(f"{name}.gate_up", dgate_up, t.h2)
        dh2 = self._column_input(dgate_up, w[f"{name}.gate_up"], f"{name}.gate_up")
        self._norm_gain(f"{name}.post_norm", dh2, t.x2, t.rstd2)
        dx2 = pointwise.rmsnorm_backward(dh2, t.x2, w[f"{name}.post_norm"], t.rstd2, dx)
        self._note(f"{name}.d_", swiglu=dact, gate_up=dgate_up, post_norm=dh2, residual=dx2)

        shards = len(self.model.context.shards)
        da = gemm.row_inputs(dx2, w[f"{name}.o"])
        self._row_weight(f"{name}.o", dx2, t.a.unflatten(1, (shards, -1)).flatten(2))
        self._note(f"{name}.d_", attention=da)
        dqkv = self._attention(i, t, da.reshape(t.a.shape))
        self._column_weight(f"{name}.qkv", dqkv, t.h1)
        dh1 = self._column_input(dqkv, w[f"{name}.qkv"], f"{name}.qkv")
        self._norm_gain(f"{name}.input_norm", dh1, t.x, t.rstd1)
        out = pointwise.rmsnorm_backward(dh1, t.x, w[f"{name}.input_norm"], t.rstd1, dx2)
        self._note(f"{name}.d_", qkv=dqkv, input_norm=dh1, input=out)
        return out

    def _note(self, prefix: str, **gradients: torch.Tensor) -> None:
        if self.recorder is not None:
            for name, gradient in gradients.items():
                self.recorder.gradient(prefix + name, gradient)

    def _attention(self, i: int, t: LayerTape, da: torch.Tensor) -> torch.Tensor:
        """Gradient of the fused projection's output, [T, S, rows]."""
        m, positions = self.model, self.batch.positions
        dq, dk, dv = self.core.backward(i, da)
        self._note(f"layers.{i}.d_", q_rope=dq, k_rope=dk, v=dv)

        def before_norm(name: str, grad: torch.Tensor, raw: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
            dnormed = pointwise.rope(grad, m.cos, m.sin, positions, backward=True)
            self._head_gain(name, dnormed, raw, rstd)
            return pointwise.rmsnorm_backward(dnormed, raw, m.weights[name], rstd)

        dq = before_norm(f"layers.{i}.q_norm", dq, t.q_raw, t.q_rstd)
        dk = before_norm(f"layers.{i}.k_norm", dk, t.k_raw, t.k_rstd)
        return m.join_qkv(dq, dk, dv)

    # Input gradients ------------------------------------------------------------------------------------------------

    def _column_input(self, dy: torch.Tensor, w: torch.Tensor, stage: str) -> torch.Tensor:
        """One leaf a virtual shard (a chain over the shard's rows), the tree over shards, one rounding. [T, K] bf16."""
        subtree = gemm.column_input_leaves(dy, w)
        return gemm.round_bf16(tree_all_reduce(subtree[None], self.tp, f"{stage} input gradient"))

    def _local_columns(self, dlogits: torch.Tensor) -> torch.Tensor:
        """This rank's columns of dlogits, with zeros where the vocabulary is padded: [R, S, V / 8]."""
        m, shards = self.model, self.model.context.shards
        height = m.shape.padded_vocab // 8
        padded = torch.nn.functional.pad(dlogits, (0, m.shape.padded_vocab - dlogits.shape[1]))
        local = padded[:, shards.start * height : shards.stop * height]
        return local.reshape(dlogits.shape[0], len(shards), height).contiguous()

    # Weight gradients: per sample a leaf a slice, the subtree of this rank's slices ----------------------------------

    def _column_weight(self, name: str, dy: torch.Tensor, x: torch.Tensor) -> None:
        t, shards, rows = dy.shape
        grads = gemm.weight_gradients(dy.reshape(t, shards * rows), x, self.batch.slices)
        self.sums.add(name, grads.reshape(-1, shards, rows, x.shape[1]))

    def _row_weight(self, name: str, dy: torch.Tensor, x: torch.Tensor) -> None:
        self.sums.add(name, gemm.row_weight_gradients(dy, x, self.batch.slices))

    def _gain_leaves(self, dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, groups: int) -> torch.Tensor:
        """[samples * slices, groups, N]: leaves of a gain, a row of x [T, ..., N] being one of a group's heads."""
        shape = (x.shape[0], groups, x.shape[1:-1].numel() // groups, x.shape[-1])
        ranges = tuple(r for sample in self.batch.slices for r in sample)
        return pointwise.rmsnorm_gains(dy.view(shape), x.view(shape), rstd, ranges)

    def _add_gain(self, name: str, leaves: torch.Tensor) -> None:
        """leaves [samples * slices, N]."""
        by_slice = leaves.view(len(self.batch.slices), -1, leaves.shape[-1]).transpose(0, 1)
        self.sums.add(name, tree_sum(by_slice)[:, None, None])

    def _norm_gain(self, name: str, dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor) -> None:
        self._add_gain(name, self._gain_leaves(dy, x, rstd, 1)[:, 0])

    def _head_gain(self, name: str, dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor) -> None:
        """Gain of a q or k norm: token, then head, a leaf per virtual shard and slice; the tree over shards, then
        over slices."""
        leaves = self._gain_leaves(dy, x, rstd, len(self.model.context.shards)).transpose(0, 1).contiguous()
        self._add_gain(name, tree_all_reduce(leaves, self.tp, f"gradient of {name}"))

    def _head_weight(self, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
        """The output embedding's gradient: response rows only, a sample at a time, since it is as large as the
        vocabulary."""
        r, shards, height = dlogits.shape
        name = TIED_HEAD if self.model.shape.tie_word_embeddings else "head"
        x = hidden[self.batch.rows]
        for ranges in self.batch.row_slices:
            grads = gemm.weight_gradients(dlogits.view(r, shards * height), x, [ranges])
            self.sums.add(name, grads.view(1, shards, height, hidden.shape[1]))

    def _embedding(self, dx: torch.Tensor) -> None:
        """A sample touches few rows of the table, and every rank knows which: only these are summed and exchanged."""
        m, cp = self.model, self.model.context.cp
        first = m.context.shards.start * (m.shape.padded_vocab // 8)
        last = m.context.shards.stop * (m.shape.padded_vocab // 8)
        partials, touched = [], []
        for sample, ranges in zip(self.batch.samples, self.batch.slices, strict=True):
            ids = torch.tensor(sample.tokens, device=dx.device)
            table = ids[(ids >= first) & (ids < last)].unique()
            ended = torch.cat([table, table.new_tensor([last])])  # a place for ids that are nobody's
            place = torch.searchsorted(ended, self.batch.ids).clamp(max=table.numel())
            place = torch.where(ended[place] == self.batch.ids, place, -1)
            leaves = [pointwise.embedding_leaf(dx[a:z], place[a:z].contiguous(), table.numel()) for a, z in ranges]
            partials.append(tree_sum(torch.stack(leaves)))
            touched.append(table - first)
        summed = tree_all_reduce(torch.cat(partials)[None], cp, "gradient of embed")
        for rows, contribution in zip(touched, summed.split([len(t) for t in touched]), strict=True):
            self.sums.add_rows("embed", rows, contribution)
