"""The page about profiles is what the schema gives, and its example makes the plans that it promises.

The example's model has the sizes of Qwen3-8B's published config.json; its files are made up here, since a plan reads
no more than these.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlk.cli import main
from rlk.plan.derive import Plan
from tools import profile_page

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 151645,
}
COMMANDS = re.findall(r"^rlk (?:verify|run) .*$", profile_page.HEAD, re.MULTILINE)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the example's paths lead somewhere, as the current one."""
    content = json.loads(profile_page.EXAMPLE.read_text(encoding="utf-8"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "prompts.jsonl").write_text("")
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    content |= {"model": "model", "prompts": "prompts.jsonl", "python": "python", "framework": "."}
    (tmp_path / ".rlk-profile.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_page_is_what_the_schema_gives() -> None:
    written = profile_page.PAGE.read_text(encoding="utf-8")
    assert written == profile_page.page(), "run: python tools/profile_page.py"


def test_page_names_every_field() -> None:
    for model in (profile_page.Profile, profile_page.EngineLimits, profile_page.Timeouts):
        described = {name: field.description for name, field in model.model_fields.items()}
        assert [name for name, text in described.items() if not text] == []
        rows = [name for name in described if f"| `{name}` |" in profile_page.page()]
        assert set(described) - set(rows) <= {"origin"}


def test_page_shows_four_commands() -> None:
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_page_makes_its_plan(machine: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    words = shlex.split(command)[1:]
    assert main(["plan", *words, "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.profile.name, plan.config.command) == ("qwen3-8b-h100", words[0])
    assert plan.train.ranks == plan.profile.gpus == 8
    assert plan.engines * plan.rollout.ranks == 8
    assert plan.token_budget == 1024 // plan.train.cp
    assert plan.padded_vocab == 152576
    assert plan.transport == "cuda-ipc"
    assert plan.graph_sizes == () or plan.graph_sizes[-1] == min(64, -(-128 // plan.engines))
    assert (plan.graph_sizes == ()) == (plan.rollout.cp > 1 or plan.config.mode == "native")
    assert (plan.config.lr, plan.config.kl_coef) == (5e-7, 0.01)
    assert not plan.offload


def test_trainer_and_engine_without_tensor_parallelism_offload(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "verify", "--tp", "1", "--rollout-tp", "1", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).offload
