"""Profiles and model shapes: where one is found, and that a wrong file is refused with its place and every fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlk.plan.errors import ConfigErrors
from rlk.plan.profile import load_profile
from rlk.plan.shape import read_shape
from tests.unit.tiny import MODEL, profile, write_profile

WRONG_PROFILES: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 3}, "ranks 3"),
    ({"device": "tpu"}, "device tpu"),
    ({"device": "cuda", "gpus": 3}, "gpus 3"),
    ({"device": "cuda", "ranks": 2, "gpus": 4}, "gpus 4: allowed is a number that divides the 2 ranks"),
    ({"gpus": 1}, "gpus 1: device cpu takes none"),
    ({"engine": {"max_engines": 0}}, "engine.max_engines 0"),
    ({"engine": {"block_size": 12}}, "engine.block_size 12"),
    ({"engine": {"max_num_batched_tokens": 8}}, "max_num_batched_tokens must be at least max_num_seqs 16"),
    ({"prompts_per_step": True}, "prompts_per_step True"),
    ({"colour": "red"}, "colour red"),
    ({"origin": "elsewhere"}, "origin: is set by the loader"),
    ({"name": "two words"}, "name 'two words'"),
]

WRONG_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 4}, "num_key_value_heads 4: allowed is a multiple of 8"),
    ({"num_attention_heads": 12}, "num_attention_heads 12: allowed is a multiple of 8"),
    ({"num_attention_heads": 24, "num_key_value_heads": 16}, "allowed is a multiple of num_key_value_heads 16"),
    ({"intermediate_size": 380}, "intermediate_size 380: allowed is a multiple of 8"),
    ({"head_dim": 15}, "head_dim 15"),
    ({"hidden_size": "128"}, "hidden_size 128: allowed is a whole number"),
    ({"model_type": "llama"}, "model_type llama: allowed is qwen3"),
    ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type yarn"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"eos_token_id": None}, "eos_token_id: missing"),
    ({"eos_token_id": 400}, "eos_token_id 400: allowed is 0 to 399"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
]


def test_folder_profile_comes_before_the_embedded(tmp_path: Path) -> None:
    path = write_profile(tmp_path)
    loaded = load_profile(None, tmp_path)
    assert loaded.origin == str(path)
    assert loaded.model == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("asked", "ranks", "there", "used"),
    [(None, 8, 8, 8), (None, 8, 3, 2), (None, 2, 8, 2), (None, 8, 0, 1), (8, 8, 2, 8), (1, 8, 8, 1)],
)
def test_ranks_are_spread_over_a_dividing_number_of_gpus(asked: int | None, ranks: int, there: int, used: int) -> None:
    assert profile(device="cuda", ranks=ranks, gpus=asked).gpus_of(there) == used


def test_embedded_profile_is_used_without_a_file(tmp_path: Path) -> None:
    loaded = load_profile(None, tmp_path)
    assert loaded.origin == loaded.name == "tiny-cpu"
    assert (loaded.ranks, loaded.device, loaded.engine.max_engines) == (8, "cpu", 2)
    shape = read_shape(loaded.model)
    assert (shape.heads, shape.kv_heads, shape.padded_vocab) == (16, 8, 1024)
    assert shape.tokenizer_len is not None
    assert 300 <= shape.tokenizer_len <= 900


def test_unknown_profile_lists_the_embedded_names(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigErrors, match=r"--profile \S*/tiny-gpu: .*embedded name: hopper-8b, hopper-small, micro-cpu, tiny-cpu"
    ):
        load_profile("tiny-gpu", tmp_path)


@pytest.mark.parametrize(("change", "message"), WRONG_PROFILES)
def test_wrong_profile_is_refused_with_its_place(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_profile(tmp_path, **change)
    with pytest.raises(ConfigErrors) as caught:
        load_profile(None, tmp_path)
    (line,) = caught.value.errors
    assert line.startswith(f"profile {path}: ")
    assert message in line


def test_every_fault_of_a_profile_is_reported(tmp_path: Path) -> None:
    write_profile(tmp_path, ranks=3, device="tpu", prompts_per_step=0)
    with pytest.raises(ConfigErrors) as caught:
        load_profile(None, tmp_path)
    assert len(caught.value.errors) == 3


@pytest.mark.parametrize("name", ["model", "prompts", "reference", "python", "framework"])
def test_paths_that_lead_nowhere_are_refused(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = {name: "nowhere"}
    write_profile(tmp_path, **changes)
    with pytest.raises(ConfigErrors, match=rf"{name} {tmp_path}/nowhere: nothing usable there"):
        load_profile(None, tmp_path)


def test_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".rlk-profile.json").write_text("{")
    with pytest.raises(ConfigErrors, match="not JSON"):
        load_profile(None, tmp_path)


def test_shape_reads_both_places_of_theta(tmp_path: Path) -> None:
    new = {key: value for key, value in MODEL.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    shapes = []
    for index, model in enumerate((MODEL, new)):
        write_profile(tmp_path / str(index), model)
        shapes.append(read_shape(str(tmp_path / str(index) / "model")))
    assert shapes[0] == shapes[1]
    assert shapes[0].rope_theta == 1e6


@pytest.mark.parametrize(("change", "message"), WRONG_MODELS)
def test_wrong_model_is_refused_with_its_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_profile(tmp_path, {**MODEL, **change})
    with pytest.raises(ConfigErrors) as caught:
        read_shape(str(tmp_path / "model"))
    assert any(message in line for line in caught.value.errors)
    assert all(line.startswith(f"model {tmp_path}/model: ") for line in caught.value.errors)


def test_three_sizes_of_vocabulary_are_kept_apart(tmp_path: Path) -> None:
    write_profile(tmp_path)
    vocabulary = {f"t{index}": index for index in range(380)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 379}, {"id": 380}, {"id": 381}]}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    shape = read_shape(str(tmp_path / "model"))
    assert (shape.tokenizer_len, shape.vocab_size, shape.padded_vocab) == (382, 400, 1024)


def test_tokenizer_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    tokenizer = {"model": {"vocab": {f"t{index}": index for index in range(401)}}}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigErrors, match=r"tokenizer\.json has 401 ids: allowed is at most vocab_size 400"):
        read_shape(str(tmp_path / "model"))


def test_generation_config_never_reaches_the_shape(tmp_path: Path) -> None:
    write_profile(tmp_path)
    before = read_shape(str(tmp_path / "model"))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"top_k": 20, "eos_token_id": [1, 3]}))
    assert read_shape(str(tmp_path / "model")) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "parity"}, "reward parity: allowed is answer"),
        ({"weights_seed": 3}, "weights_seed 3: random weights are for profiles with test true"),
        ({"collectives": "cuda-ipc"}, "collectives cuda-ipc: device cpu allows host"),
    ],
)
def test_what_only_tests_or_gpus_may_ask_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        profile(**change)
    assert profile(device="cuda", test=True, **change)


def test_gpu_profile_is_a_test_of_eight_ranks() -> None:
    loaded = load_profile("hopper-small", Path())
    shape = read_shape(loaded.model)
    assert (loaded.device, loaded.ranks, loaded.collectives, loaded.test) == ("cuda", 8, "cuda-ipc", True)
    assert (shape.layers, shape.hidden, shape.intermediate, shape.padded_vocab) == (28, 1024, 3072, 152576)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.tie_word_embeddings) == (16, 8, 128, True)
