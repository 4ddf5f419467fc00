"""The embedded model and prompts are what the suite assumes they are.

Sizes: 16 query and 8 KV heads make tensor parallelism of 8 and grouped queries real; a tokenizer of 384 below a
vocabulary of 400 below a padded 1,024 keeps the three sizes apart, so that an id between two of them can be tested.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

ASSETS = Path(__file__).parents[2] / "assets"
MODEL = ASSETS / "tiny-qwen3"
PADDING_MULTIPLE = 128 * 8
MARKER = "Show the steps."

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return _json("config.json")


@pytest.fixture(scope="module")
def sums() -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / "sums.jsonl").read_text().splitlines()]


def test_config_has_the_agreed_sizes(config: dict[str, Any]) -> None:
    agreed = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "intermediate_size": 384,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in agreed} == agreed


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"])
def test_eight_ranks_divide_every_dimension(config: dict[str, Any], key: str) -> None:
    assert config[key] % 8 == 0


def test_three_vocabulary_sizes_stay_apart(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    length, real = tokenizer.get_vocab_size(), config["vocab_size"]
    padded = -(-real // PADDING_MULTIPLE) * PADDING_MULTIPLE
    assert 300 <= length < real < padded == 1024
    assert length >= 128, "top-k 128 must be legal"


def test_special_tokens_have_config_ids(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    named = _json("tokenizer_config.json")
    assert (named["pad_token"], named["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.token_to_id(named["pad_token"]) == config["pad_token_id"]
    assert tokenizer.token_to_id(named["eos_token"]) == config["eos_token_id"]
    assert tokenizer.encode("1<|im_end|>").ids[-1] == config["eos_token_id"], "special text is one token"


def test_generation_config_tempts_with_defaults() -> None:
    tempting = {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05}
    found = _json("generation_config.json")
    assert {key: found[key] for key in tempting} == tempting


def test_checkpoint_holds_every_qwen3_tensor(config: dict[str, Any]) -> None:
    with safe_open(MODEL / "model.safetensors", framework="numpy") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118  (not a mapping)
        found = {name: tuple(part.get_shape()) for name, part in slices.items()}
        types = {part.get_dtype() for part in slices.values()}
    assert found == _expected_shapes(config)
    assert types == {"BF16"}


def test_checkpoint_fits_in_four_megabytes() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 4_000_000


def test_every_digit_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("9081726354").tokens == list("9081726354")


def test_byte_fallback_restores_any_text(tokenizer: Tokenizer) -> None:
    text = "Zoë paid 12 €\t— 數\n\n 7"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_prompts_have_five_to_thirty_tokens(tokenizer: Tokenizer, sums: list[dict[str, str]]) -> None:
    lengths = [len(tokenizer.encode(row["prompt"]).ids) for row in sums]
    assert 5 <= min(lengths) < max(lengths) <= 30


def test_prompts_are_256_different_ones(sums: list[dict[str, str]]) -> None:
    assert len(sums) == len({row["prompt"] for row in sums}) == 256
    assert all(set(row) == {"prompt", "label"} for row in sums)


def test_labels_are_the_true_sums(sums: list[dict[str, str]]) -> None:
    for row in sums:
        assert row["label"] == str(sum(map(int, re.findall(r"\d+", row["prompt"])))), row


def test_any_four_neighbours_mix_kinds(sums: list[dict[str, str]]) -> None:
    worked = [MARKER in row["prompt"] for row in sums]
    for start in range(len(worked) - 3):
        assert len(set(worked[start : start + 4])) == 2, f"prompts {start} to {start + 3}"


def test_answers_begin_a_new_word(tokenizer: Tokenizer, sums: list[dict[str, str]]) -> None:
    for row in sums:
        assert _joined(tokenizer, row["prompt"], row["label"]), row


def test_split_word_would_join_tokens(tokenizer: Tokenizer) -> None:
    assert not _joined(tokenizer, "Show the st", "eps"), "the boundary test above could not fail"


def _joined(tokenizer: Tokenizer, prompt: str, answer: str) -> bool:
    """Whether encoding the two apart gives the ids of encoding them together."""
    return bool(tokenizer.encode(prompt).ids + tokenizer.encode(answer).ids == tokenizer.encode(prompt + answer).ids)


def _json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODEL / name).read_text())
    return content


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, wide),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_norm": (head,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
