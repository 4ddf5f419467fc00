"""Records a fingerprint a row of what every op returns, and changes nothing: it reads outputs on their way.

`ProbedOps` stands around the ops of a model and knows the program by the order of the calls; a call out of order stops
the run, so a recorded name is never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlk.evidence.program import POLICY, Op, backward, forward
from rlk.kernels import state
from rlk.kernels.collectives.base import Collective
from rlk.model.ops import CanonicalOps, Ops
from rlk.model.parallel import ParallelContext

_METHODS = {
    "embed": {"embedding"},
    "rmsnorm": {"input_norm", "q_norm", "k_norm", "post_norm", "norm"},
    "column": {"qkv", "gate_up", "logits"},
    "rope": {"q_rope", "k_rope"},
    "row": {"attention"},
    "leaves": {"o_leaves", "down_leaves"},
    "join": {"o", "down"},
    "add": {"residual", "output"},
    "swiglu": {"swiglu"},
    "gather_columns": {"gathered_logits"},
}


class ProbeError(RuntimeError):
    """The model did not call its ops in the order of the program, or with the rows that were announced."""


class Recorder:
    """Fingerprints of one rank, phase by phase, until `take` empties it. Outside of a phase nothing is recorded."""

    def __init__(self, context: ParallelContext, layers: int, *, native: bool, keep: str | None = None) -> None:
        """`keep`, OP@SAMPLE/POSITION, names one row whose raw words are kept as well."""
        self.context, self.native = context, native
        op, _, place = (keep or "").partition("@")
        self._kept = (op, *map(int, place.split("/"))) if keep else None
        self.program = forward(layers, native=native)
        self._backward = {op.name: op for op in backward(layers)}
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self._keys: dict[str, npt.NDArray[np.int64]] = {}
        self._phase: str | None = None
        self._at = self._tokens = self._head = 0
        self._policy: dict[str, torch.Tensor] = {}

    def begin(
        self,
        phase: str,
        sample: torch.Tensor,
        position: torch.Tensor,
        head: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Starts a pass over rows of these samples and positions, int64 [T]; head int64 [R]: those that predict a
        token. rows int64 [M]: those computed here; all if None. Every rank predicts all tokens."""
        self.end()
        keys = {"head_sample": sample[head], "head_position": position[head]}
        keys |= (
            {"sample": sample, "position": position}
            if rows is None
            else {"sample": sample[rows], "position": position[rows]}
        )
        self._tokens, self._head = keys["sample"].numel(), head.numel()
        self._keys = {name: value.to(torch.int64).cpu().numpy().copy() for name, value in keys.items()}
        self.turn(phase)

    @property
    def active(self) -> bool:
        """Whether a pass is recorded now."""
        return self._phase is not None

    def turn(self, phase: str) -> None:
        """Starts another pass over the same rows."""
        self.end()
        self._phase, self._at = phase, 0
        for name, value in self._keys.items():
            self._keep(f"{phase}/{name}", value)

    def end(self) -> None:
        """Ends the pass."""
        for op in POLICY if self._policy else ():
            if self.program[self._at : self._at + 1] != (op,):
                raise ProbeError(f"probe: a token was drawn or scored before its logits were recorded ({op.name})")
            self._at += 1
            self._rows(op, self._policy[op.name])
        self._policy, self._phase = {}, None

    def policy(self, steps: Mapping[str, torch.Tensor]) -> None:
        """What drawing or scoring the pass's rows was given and returned, [R] or [R, elements] by name of POLICY. A
        second call over the same rows replaces the first."""
        self._policy.update(steps)

    def head_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample and position, int64 [R], of the rows that predict a token."""
        return torch.from_numpy(self._keys["head_sample"]), torch.from_numpy(self._keys["head_position"])

    def output(self, method: str, x: torch.Tensor) -> None:
        """The next output of the program, returned by `method` of the ops."""
        if self._phase is None:
            return
        op = self.program[self._at] if self._at < len(self.program) else None
        if op is None or op.name.rpartition(".")[2] not in _METHODS[method]:
            expected = op.name if op else "no further op"
            raise ProbeError(f"probe: {method} was called where the program has {expected}: it must follow the model")
        self._at += 1
        self._rows(op, x)

    def expects(self, name: str) -> bool:
        """Whether the next output of the program is that of a layer's `name`."""
        coming = self.program[self._at : self._at + 1] if self._phase is not None else ()
        return any(op.name.rpartition(".")[2] == name for op in coming)

    def gradient(self, name: str, x: torch.Tensor) -> None:
        """An output of the backward pass, by name."""
        if self._phase is not None:
            self._rows(self._backward[name], x)

    def atoms(self, kind: str, pieces: Mapping[str, torch.Tensor]) -> None:
        """An input or output of the optimizer: fp32 [S, pieces, elements] by parameter, a fingerprint an atom."""
        for name, x in pieces.items():
            words = state.row_fingerprints(x.flatten(0, 1).contiguous()).view(x.shape[:2])
            self._keep(f"optimizer/{kind}/{name}", words.cpu().numpy().view(np.uint64))

    def take(self) -> dict[str, npt.NDArray[Any]]:
        """Everything recorded since the last call, by the names of rlk.evidence.probe."""
        self.end()
        taken, self._parts = {name: np.concatenate(parts) for name, parts in self._parts.items()}, {}
        return taken

    def _rows(self, op: Op, x: torch.Tensor) -> None:
        rows = self._head if op.head else self._tokens
        if x.shape[0] < rows:
            raise ProbeError(f"probe: {op.name} has {x.shape[0]} rows, {rows} were announced")
        if op.kept is not None:
            values = x[:rows].cpu().numpy()
            bits = values.view(np.uint32) if op.kept == "fp32" else values
            self._keep(f"{self._phase}/{op.name}", bits.astype(np.uint64)[:, None])
            return
        shards = self.context.shards if op.sharded else range(1)
        words = state.row_fingerprints(x[:rows].detach().flatten(1).contiguous(), len(shards), shards.start)
        self._keep(f"{self._phase}/{op.name}", words.cpu().numpy().view(np.uint64))
        if self._kept is not None and self._kept[0] == op.name:
            prefix = "head_" if op.head else ""
            place = zip(self._keys[f"{prefix}sample"].tolist(), self._keys[f"{prefix}position"].tolist(), strict=True)
            raw = x[[row for row, key in enumerate(place) if key == self._kept[1:]]].detach().flatten(1).contiguous()
            unsigned = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}[raw.element_size()]
            self._keep(f"row/{self._phase}/{op.name}", raw.view(unsigned[0]).cpu().numpy().view(unsigned[1]).copy())

    def _keep(self, name: str, part: npt.NDArray[Any]) -> None:
        self._parts.setdefault(name, []).append(part)


class ProbedOps:
    """See rlk.model.ops.Ops."""

    def __init__(self, inner: Ops, recorder: Recorder) -> None:
        self.inner, self.recorder, self.name = inner, recorder, inner.name

    def prepare_column(self, w: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self.inner.prepare_column(w)

    def prepare_row(self, w: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self.inner.prepare_row(w)

    def embed(self, table: torch.Tensor, ids: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops."""
        return self._seen("embed", self.inner.embed(table, ids, tp))

    def column(self, x: torch.Tensor, w: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops."""
        return self._seen("column", self.inner.column(x, w, tp))

    def row(self, x: torch.Tensor, w: torch.Tensor, tp: Collective, stage: str) -> torch.Tensor:
        """See Ops. The attention core is no op: its output is seen where it goes in here; leaves on their way."""
        if self.recorder.expects("attention"):
            self.recorder.output("row", x)
        if not isinstance(self.inner, CanonicalOps) or not self.recorder.active:
            return self._seen("join", self.inner.row(x, w, tp, stage))
        leaves = self.inner.leaves(x, w)
        self.recorder.output("leaves", leaves.transpose(0, 1))
        return self._seen("join", self.inner.join(leaves, tp, stage))

    def rmsnorm(self, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        y, rstd = self.inner.rmsnorm(x, w, eps)
        return self._seen("rmsnorm", y), rstd

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self._seen("rope", self.inner.rope(x, cos, sin, positions))

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self._seen("swiglu", self.inner.swiglu(gate_up))

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self._seen("add", self.inner.add(a, b))

    def gather_columns(self, x: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops."""
        return self._seen("gather_columns", self.inner.gather_columns(x, tp))

    def _seen(self, method: str, x: torch.Tensor) -> torch.Tensor:
        self.recorder.output(method, x)
        return x
