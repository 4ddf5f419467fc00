"""The tiny Qwen3: its published-form config, a seeded start, and a bf16 checkpoint in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.tiny_tokenizer import EOS, PAD, TOKENIZER_LENGTH

# A little more than the tokenizer, as Qwen's 151,936 is: ids that no text has, yet the softmax counts.
VOCAB_SIZE = TOKENIZER_LENGTH + 16
PAD_ID = TOKENIZER_LENGTH - 2
EOS_ID = TOKENIZER_LENGTH - 1

# The keys and spelling of a published Qwen3 config.json. 16 query heads, 8 KV heads, hidden, intermediate and the
# padded vocabulary all divide by 8, so tensor parallelism of 8 is real.
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "max_window_layers": 4,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "pad_token_id": PAD_ID,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}

# Defaults of the kind that Qwen ships. They are here to be ignored: an engine that lets them leak is wrong.
GENERATION: dict[str, object] = {
    "bos_token_id": PAD_ID,
    "do_sample": True,
    "eos_token_id": [EOS_ID, PAD_ID],
    "pad_token_id": PAD_ID,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}


def new_model(seed: int) -> Qwen3ForCausalLM:
    """An untrained fp32 model, its weights drawn from ``seed``."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config.from_dict({**CONFIG, "torch_dtype": "float32"}))


def round_to_bf16(model: Qwen3ForCausalLM) -> None:
    """Rounds every weight to bf16 in place, so that what is measured in fp32 arithmetic is what is saved."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Writes ``model.safetensors`` (bf16), ``config.json`` and ``generation_config.json``."""
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


def check_ids(tokenizer: Tokenizer) -> None:
    """Raises ValueError unless the tokenizer's special tokens have the ids that the config names."""
    found = (tokenizer.token_to_id(PAD), tokenizer.token_to_id(EOS))
    if found != (PAD_ID, EOS_ID):
        raise ValueError(f"special tokens have ids {found}; config.json says {(PAD_ID, EOS_ID)}")
