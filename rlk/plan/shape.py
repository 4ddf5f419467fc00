"""The sizes of a Qwen3 model, read from the files of its checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from rlk.plan.errors import ConfigErrors, shown
from rlk.plan.topology import VIRTUAL, padded_rows

_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}

# The one model definition has no code for other values of these, and a setting that is ignored makes a wrong model.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. `vocab_size` is the real vocabulary: the domain of the softmax and the bound of top-k.

    Three sizes must not be mixed up: `tokenizer_len` <= `vocab_size` < `padded_vocab`. Ids between the first two have
    trained rows and may be sampled; rows from the second on are padding, which no maximum, sum or sample ever sees.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_ids: tuple[int, ...]
    tokenizer_len: int | None = None

    def __post_init__(self) -> None:
        errors = tuple(self._errors())
        if errors:
            raise ConfigErrors(errors)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and of the head, the same for every topology."""
        return padded_rows(self.vocab_size)

    def kv_bytes(self, tp: int, cp: int) -> int:
        """Bytes of bfloat16 keys and values that one token takes on one rank of an engine; cp shards the tokens."""
        return 2 * 2 * self.layers * (self.kv_heads // tp) * self.head_dim // cp

    def _errors(self) -> Iterator[str]:
        for name, key in _SIZES.items():
            if getattr(self, name) < 1:
                yield f"{key} {getattr(self, name)}: allowed is a whole number >= 1"
        for name in ("heads", "kv_heads", "intermediate"):
            if getattr(self, name) % VIRTUAL:
                yield f"{_SIZES[name]} {getattr(self, name)}: allowed is a multiple of {VIRTUAL} (the virtual shards)"
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            yield f"num_attention_heads {self.heads}: allowed is a multiple of num_key_value_heads {self.kv_heads}"
        if self.head_dim % 2:
            yield f"head_dim {self.head_dim}: allowed is an even number (rotary pairs)"
        for name, number in (("rms_norm_eps", self.rms_eps), ("rope_theta", self.rope_theta)):
            if not (math.isfinite(number) and number > 0):
                yield f"{name} {number}: allowed is finite and > 0"
        if not self.eos_ids:
            yield "eos_token_id: missing: give at least one id, or no answer ever ends"
        for token in self.eos_ids:
            if not 0 <= token < self.vocab_size:
                yield f"eos_token_id {token}: allowed is 0 to {self.vocab_size - 1}, the ids of the vocabulary"
        if self.tokenizer_len is not None and self.tokenizer_len > self.vocab_size:
            yield f"tokenizer.json has {self.tokenizer_len} ids: allowed is at most vocab_size {self.vocab_size}"


def read_shape(model: str) -> ModelShape:
    """The shape of the checkpoint in folder `model`: its config.json, and the tokenizer's length where there is one.

    generation_config.json is never read: what nobody asked for must not reach a sampler. Raises ConfigErrors.
    """
    folder = Path(model)
    config = _read_object(folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    length = _tokenizer_len(tokenizer) if tokenizer.exists() else None
    try:
        return _shape(config, length)
    except ConfigErrors as error:
        raise ConfigErrors(f"model {folder}: {line}" for line in error.errors) from error


def _shape(config: dict[str, Any], tokenizer_len: int | None) -> ModelShape:
    rope = config.get("rope_parameters") or {}  # where transformers 5 keeps theta
    sizes = {name: config.get(key) for name, key in _SIZES.items()}
    numbers = {"rms_eps": config.get("rms_norm_eps"), "rope_theta": config.get("rope_theta", rope.get("rope_theta"))}
    errors = [f"{_SIZES[name]} {shown(n)}: allowed is a whole number" for name, n in sizes.items() if not _whole(n)]
    errors += [f"{name} {shown(n)}: allowed is a number" for name, n in numbers.items() if type(n) not in (int, float)]
    for key, allowed in _FIXED.items():
        if config.get(key) not in allowed:
            errors.append(f"{key} {shown(config.get(key))}: allowed is {shown(allowed[0])}")
    if rope.get("rope_type", "default") != "default":
        errors.append(f"rope_type {shown(rope['rope_type'])}: allowed is default")
    eos = config.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    errors += [f"eos_token_id {shown(n)}: allowed is a whole number" for n in eos if not _whole(n)]
    if errors:
        raise ConfigErrors(errors)
    fields: dict[str, Any] = {**sizes, **{name: float(n) for name, n in numbers.items() if n is not None}}
    return ModelShape(
        **fields,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_ids=tuple(eos),
        tokenizer_len=tokenizer_len,
    )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokenizer_len(path: Path) -> int:
    """Distinct ids of a tokenizer.json: those of the model's vocabulary and the added ones."""
    tokenizer = _read_object(path)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    return len(ids | {token["id"] for token in tokenizer.get("added_tokens") or ()})


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise ConfigErrors([f"model {path}: {reason}: allowed is a Qwen3 checkpoint folder"]) from error
    if not isinstance(content, dict):
        raise ConfigErrors([f"model {path}: allowed is a JSON object"])
    return content
