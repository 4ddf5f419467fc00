"""Files of a probed run: what one rank computed, a 64-bit fingerprint a row of every op's output.

`steps/NNNNNN/probe-ROLE.safetensors`, schema rlk.probe/1, ROLE a train or engine rank. Per phase, T rows of tokens and
R rows of predicted tokens: `PHASE/sample` i64[T] and `PHASE/position` i64[T], `PHASE/head_sample` and
`PHASE/head_position` i64[R], and `PHASE/OP` u64[rows, S] (S virtual shards held there) or u64[rows, 1]; of an op whose
value is kept, the value. A train rank adds `optimizer/STATE/PARAMETER` u64[S, pieces], one an atom. With --probe-row
there is `row/PHASE/OP`, the raw words u16 or u32 [times, elements] of that row, once for each time that it was
computed. The header says role, first shard and first piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rlk.evidence.arrays import I64
from rlk.evidence.errors import EvidenceError
from rlk.evidence.program import PHASES, STATES, Op, parameters, program

SCHEMA = "rlk.probe/1"
U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Probe:
    """What one rank recorded in one step. `arrays` are named as in the file."""

    role: str
    shard0: int
    piece0: int
    arrays: Mapping[str, NDArray[Any]]

    def phases(self) -> tuple[str, ...]:
        """The phases it took part in."""
        return tuple(phase for phase in PHASES if f"{phase}/sample" in self.arrays)

    def rows(self, phase: str, op: Op) -> tuple[I64, I64, U64]:
        """Sample and position of every row of an op, and the fingerprints [rows, shards or 1]."""
        prefix = f"{phase}/head_" if op.head else f"{phase}/"
        return self.arrays[f"{prefix}sample"], self.arrays[f"{prefix}position"], self.arrays[f"{phase}/{op.name}"]

    def to_bytes(self, step: int) -> bytes:
        """The file."""
        header = {"schema": SCHEMA, "step": str(step), "role": self.role}
        header |= {"shard0": str(self.shard0), "piece0": str(self.piece0)}
        content: bytes = save({name: np.ascontiguousarray(a) for name, a in self.arrays.items()}, metadata=header)
        return content

    @classmethod
    def read(cls, path: Path, where: str, step: int, role: str) -> Probe:
        """Reads what `to_bytes` made. Raises EvidenceError."""
        if not path.is_file():
            raise EvidenceError(f"{where}: missing")
        try:
            with safe_open(path, framework="np") as file:
                header = dict(file.metadata() or {})
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError, ValueError) as error:
            raise EvidenceError(f"{where}: cannot be read: {error}") from error
        place = [header.pop(name, "") for name in ("shard0", "piece0")]
        expected = {"schema": SCHEMA, "step": str(step), "role": role}
        if header != expected or not all(text.isdecimal() for text in place):
            raise EvidenceError(f"{where}: header is {header}, expected {expected} and the first shard and piece")
        return cls(role, int(place[0]), int(place[1]), arrays)

    def problem(self, layers: int, *, native: bool, tied: bool) -> str | None:
        """What is missing, unknown or of the wrong length for its role, as a sentence; None where all is there."""
        trains = self.role.startswith("train-")
        phases = ("score", "update", *(() if native else ("backward",))) if trains else ("rollout",)
        expected: dict[str, int | None] = {}
        for phase in phases:
            tokens, head = (len(self.arrays.get(f"{phase}/{name}", ())) for name in ("sample", "head_sample"))
            keys = {"sample": tokens, "position": tokens, "head_sample": head, "head_position": head}
            expected |= {f"{phase}/{name}": rows for name, rows in keys.items()}
            ops = program(phase, layers, native=native)
            expected |= {f"{phase}/{op.name}": head if op.head else tokens for op in ops}
        if trains:
            names = list(parameters(layers, tied=tied))
            expected |= {f"optimizer/{state}/{name}": None for state in STATES for name in names}
        odd = sorted(expected.keys() ^ {name for name in self.arrays if not name.startswith("row/")})
        if odd:
            return f"{odd[0]} is {'missing' if odd[0] in expected else 'no array of a probe'}"
        for name, rows in expected.items():
            if rows is not None and len(self.arrays[name]) != rows:
                return f"{name} has {len(self.arrays[name])} rows, {rows} are needed"
        return None
