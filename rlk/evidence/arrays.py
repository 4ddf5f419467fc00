"""Array files of a run directory: one table of their columns, and how they are written and read.

Every array is one-dimensional and little-endian. Lengths: N samples, P all prompt tokens, R all response tokens,
M rows of a train rank, K tokens that the oracle looked at. Samples follow each other in the ragged columns in the
order of `sample_id`.

| file | schema | column: dtype[length] |
|---|---|---|
| steps/NNNNNN/rollout-EE.safetensors | rlk.rollout/1 | sample_id i64[N], prompt_index i64[N], prompt_len i32[N], |
| | | response_len i32[N], prompt_tokens i32[P], tokens i32[R], mask u8[R], logprobs f32[R], temperature f64[N], |
| | | top_p f64[N], top_k i64[N], finish_reason u8[N], weight_version i64[N], cached_tokens i64[N] |
| steps/NNNNNN/train-RR.safetensors | rlk.train/1 | sample_id i64[M], index i32[M], token i32[M], logprob f32[M], |
| | | update_logprob f32[M], ref_logprob f32[M], in_support u8[M] |
| steps/NNNNNN/batch.safetensors | rlk.batch/1 | sample_id i64[N], reward f64[N], advantage f64[N] |
| steps/NNNNNN/oracle.safetensors | rlk.oracle/1 | sample_id i64[K], index i64[K], token i64[K], temperature f64[K], |
| | | top_p f64[K], top_k i64[K], logprob f64[K], least f64[K], most f64[K], scale f64[K], |
| | | reachable u8[K], below f64[K], through f64[K], draw f64[K] |

The header holds the schema and the place of the file (step, engine, rank, tp_rank, cp_rank) as text; the oracle's also
the hash of the weights that it computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rlk.evidence.errors import EvidenceError

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

STOP, LENGTH = 0, 1  # values of finish_reason

_DTYPES = {"I64": np.int64, "I32": np.int32, "U8": np.uint8, "F32": np.float32, "F64": np.float64}


@dataclass(frozen=True)
class _Columns:
    """Base of the array files: the dataclass fields are the columns, their annotations the dtypes."""

    SCHEMA: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, dtype in self.dtypes().items():
            value = getattr(self, name)
            if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
                shape = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
                raise EvidenceError(f"{self.SCHEMA} column {name}: is {shape}, needs one dimension of {dtype}")

    @classmethod
    def dtypes(cls) -> dict[str, np.dtype[Any]]:
        """Column name to dtype."""
        return {field.name: np.dtype(_DTYPES[str(field.type)]) for field in fields(cls)}

    def columns(self) -> dict[str, NDArray[Any]]:
        """Column name to array, in the order of the table."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_bytes(self, place: Mapping[str, object]) -> bytes:
        """The file: schema and place in the header, then the columns."""
        header = {"schema": self.SCHEMA} | {key: str(value) for key, value in place.items()}
        content: bytes = save({name: np.ascontiguousarray(a) for name, a in self.columns().items()}, metadata=header)
        return content

    @classmethod
    def read(cls, path: Path, where: str, place: Mapping[str, object]) -> Self:
        """Read a file that must hold exactly these columns and say this schema and place. Raises EvidenceError."""
        if not path.is_file():
            raise EvidenceError(f"{where}: missing")
        expected = {"schema": cls.SCHEMA} | {key: str(value) for key, value in place.items()}
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata() or {}
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError, ValueError) as error:
            raise EvidenceError(f"{where}: cannot be read: {error}") from error
        if header != expected:
            raise EvidenceError(f"{where}: header is {header}, expected {expected}")
        if set(found) != set(cls.dtypes()):
            odd = sorted(set(found) ^ set(cls.dtypes()))
            raise EvidenceError(f"{where}: missing or unknown columns {odd}")
        try:
            return cls(**found)
        except EvidenceError as error:
            raise EvidenceError(f"{where}: {error}") from error


@dataclass(frozen=True)
class RolloutArrays(_Columns):
    """What one engine generated in one step, in any order of samples.

    `mask` is 1 for a trained token. `temperature`, `top_p`, `top_k` are the values asked for. `finish_reason` is
    0 stop, 1 length. `cached_tokens` is how much of the prompt came from the prefix cache.
    """

    SCHEMA: ClassVar[str] = "rlk.rollout/1"

    sample_id: I64
    prompt_index: I64
    prompt_len: I32
    response_len: I32
    prompt_tokens: I32
    tokens: I32
    mask: U8
    logprobs: F32
    temperature: F64
    top_p: F64
    top_k: I64
    finish_reason: U8
    weight_version: I64
    cached_tokens: I64


@dataclass(frozen=True)
class TrainArrays(_Columns):
    """The response tokens that one train rank scored in one step, in any order.

    `index` is the position in the response. `logprob` is the recomputed policy, `update_logprob` the forward that
    was differentiated, `ref_logprob` the reference. CP ranks split the tokens, TP ranks repeat them.
    """

    SCHEMA: ClassVar[str] = "rlk.train/1"

    sample_id: I64
    index: I32
    token: I32
    logprob: F32
    update_logprob: F32
    ref_logprob: F32
    in_support: U8


@dataclass(frozen=True)
class BatchArrays(_Columns):
    """Reward and advantage of every sample of one step, by sample id."""

    SCHEMA: ClassVar[str] = "rlk.batch/1"

    sample_id: I64
    reward: F64
    advantage: F64


@dataclass(frozen=True)
class OracleArrays(_Columns):
    """What the independent model says of some response tokens of one step; see `rlk.evidence.oracle`.

    `scale` is the largest magnitude among the row's logits, from which the allowed error follows. `draw` is the number
    in [0, 1) that picks a token among the kept shares in the order of ids.
    """

    SCHEMA: ClassVar[str] = "rlk.oracle/1"

    sample_id: I64
    index: I64
    token: I64
    temperature: F64
    top_p: F64
    top_k: I64
    logprob: F64
    least: F64
    most: F64
    scale: F64
    reachable: U8
    below: F64
    through: F64
    draw: F64


Arrays = RolloutArrays | TrainArrays | BatchArrays | OracleArrays


def length_problem(arrays: Arrays) -> str | None:
    """The first column whose length does not fit the others, as a sentence; None where all fit."""
    ragged: dict[str, int] = {}
    if isinstance(arrays, RolloutArrays):
        if (arrays.prompt_len < 0).any() or (arrays.response_len < 0).any():
            return "prompt_len and response_len must not be negative"
        responses = int(arrays.response_len.sum(dtype=np.int64))
        ragged = {"prompt_tokens": int(arrays.prompt_len.sum(dtype=np.int64))}
        ragged |= dict.fromkeys(("tokens", "mask", "logprobs"), responses)
    for name, column in arrays.columns().items():
        needed = ragged.get(name, len(arrays.sample_id))
        if len(column) != needed:
            return f"{name} has {len(column)} entries, {needed} are needed"
    return None
