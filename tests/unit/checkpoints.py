"""Small random Qwen3 checkpoints: two layers, so that a layer's input gradient matters, in a folder as published ones.

The smallest sizes that eight virtual shards allow, with two query heads a key head; vocabulary 300 leaves 724 of 1,024
padded rows. Scales keep activations near 1 and logits within about ten of each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlk.model.layout import parameters
from rlk.plan.shape import ModelShape, read_shape

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 2,
}


def tensors(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """Random bf16 tensors by checkpoint name: gains near 1, an embedding of size 1, projections that keep sizes."""
    generator, out = torch.Generator().manual_seed(seed), {}
    for tensor in (t for param in parameters(shape) for t in param.tensors):
        noise = torch.randn(tensor.shape, generator=generator)
        if len(tensor.shape) == 1:
            value = 1 + 0.2 * noise
        elif tensor.kind == "embedding":
            value = noise * (0.2 if shape.tie_word_embeddings else 1.0)
        else:
            value = noise / tensor.width**0.5
        out[tensor.hf_name] = value.to(torch.bfloat16)
    return out


def write(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A checkpoint in `folder`: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    save_file(tensors(read_shape(str(folder)), seed), folder / "model.safetensors", {"format": "pt"})
    return folder
