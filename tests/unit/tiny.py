"""A tiny profile and model for tests of the plan: sizes as in the embedded one, but no file of it is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlk.plan.profile import Profile
from rlk.plan.shape import ModelShape

TRAIN = ((1, 8), (2, 4), (4, 2), (8, 1))
ROLLOUT = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))
TOPOLOGIES = [(train, rollout) for train in TRAIN for rollout in ROLLOUT]

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 400,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

SHAPE = ModelShape(
    layers=4,
    hidden=128,
    intermediate=384,
    heads=16,
    kv_heads=8,
    head_dim=16,
    vocab_size=400,
    max_positions=2048,
    rms_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    eos_ids=(2,),
    tokenizer_len=390,
)

ENGINE: dict[str, Any] = {
    "max_engines": 8,
    "kv_cache_bytes": 64 << 20,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "block_size": 16,
}


def fields(**changes: Any) -> dict[str, Any]:
    """The content of a profile file; `engine` is merged, the rest replaced."""
    engine = {**ENGINE, **changes.pop("engine", {})}
    base: dict[str, Any] = {
        "name": "tiny",
        "device": "cpu",
        "ranks": 8,
        "model": "model",
        "prompts": "prompts.jsonl",
        "max_prompt_len": 64,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "defaults": {"max_response_len": 64},
    }
    return {**base, "engine": engine, **changes}


def profile(**changes: Any) -> Profile:
    """A profile in memory, as if it had been loaded."""
    return Profile.model_validate({"origin": "tiny", **fields(**changes)})


def write_profile(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A .rlk-profile.json in `folder` with everything that it points to."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL if config is None else config))
    (folder / "prompts.jsonl").write_text("")
    path = folder / ".rlk-profile.json"
    path.write_text(json.dumps(fields(**changes)))
    return path
