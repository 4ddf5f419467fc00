"""Prompts are encoded once and travel as ids; every faulty line is named; each epoch visits every prompt once.

Five prompts and batches of four: a batch that runs over the end of an epoch comes in the first two steps.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rlk.train.data import DataError, PromptSet, extract_answer

WORDS = ("<eos>", "<unk>", "one", "two", "plus", "is", "####", "3", "12")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One id a word; id 0 is a special token."""
    path, model = tmp_path / "tokenizer.json", WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>")
    built = Tokenizer(model)
    built.pre_tokenizer, built.decoder = Whitespace(), decoders.Fuse()
    built.add_special_tokens(["<eos>"])
    built.save(str(path))
    return path


def prompt_file(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def line(prompt: object = "one plus two", label: object = "3") -> str:
    return json.dumps({"prompt": prompt, "label": label}, ensure_ascii=False)


def five(folder: Path, tokenizer: Path) -> PromptSet:
    return PromptSet(prompt_file(folder, *(line(" ".join(["one"] * n)) for n in range(1, 6))), tokenizer, 8)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 2 is 3\n#### 3", "3"),
        ("#### 4 no, #### 5 ", "5"),
        ("  42\n", "42"),
        ("####", ""),
        ("", ""),
        ("### 7", "### 7"),
        ("the answer ####1,000", "1,000"),
    ],
)
def test_the_answer_follows_the_last_mark(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_prompts_become_ids_without_additions(tmp_path: Path, tokenizer: Path) -> None:
    (prompt,) = PromptSet(prompt_file(tmp_path, line(label=3)), tokenizer, 3).prompts
    assert (prompt.index, prompt.tokens, prompt.label) == (0, (2, 4, 3), "3")


def test_a_reward_is_an_exact_match(tmp_path: Path, tokenizer: Path) -> None:
    prompts = PromptSet(prompt_file(tmp_path, line(label=" 12 ")), tokenizer, 8)
    rewards = [prompts.reward(prompts.prompts[0], r) for r in ([6, 8], [6, 8, 0], [8], [6, 7], [6, 8, 8], [], [0])]
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_each_epoch_visits_every_prompt_once(tmp_path: Path, tokenizer: Path) -> None:
    prompts = five(tmp_path, tokenizer)
    visited = [p.index for step in range(5) for p in prompts.batch(step, 4, seed=1)]
    assert [sorted(visited[e : e + 5]) for e in (0, 5, 10, 15)] == [[0, 1, 2, 3, 4]] * 4
    assert all((b - a) % 5 == 1 for a, b in pairwise(visited)), "neighbours of the file stay neighbours"


def test_a_batch_depends_on_step_and_seed_alone(tmp_path: Path, tokenizer: Path) -> None:
    prompts, again = five(tmp_path, tokenizer), five(tmp_path, tokenizer)
    late = prompts.batch(7, 4, seed=1)
    assert again.batch(7, 4, seed=1) == late
    assert [prompts.batch(0, 4, seed) for seed in range(5)] != [prompts.batch(0, 4, 0)] * 5


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "3",
        '{"prompt": "one"}',
        '{"label": "3"}',
        "",
        line(prompt=5),
        line(prompt=None),
        line(prompt=["one"]),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path: Path, tokenizer: Path, bad: str) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: not a JSON object with prompt and label"):
        PromptSet(prompt_file(tmp_path, line(), bad), tokenizer, 8)


@pytest.mark.parametrize(("prompt", "count"), [("one " * 9, 9), ("", 0)])
def test_a_prompt_of_another_length_is_named(tmp_path: Path, tokenizer: Path, prompt: str, count: int) -> None:
    with pytest.raises(DataError, match=rf"prompts\.jsonl:2: the prompt has {count} tokens; allowed are 1 to 8"):
        PromptSet(prompt_file(tmp_path, line(), line(prompt)), tokenizer, 8)


def test_a_file_without_prompts_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match="no prompts; give one JSON object a line"):
        PromptSet(prompt_file(tmp_path), tokenizer, 8)


@pytest.mark.parametrize("separator", ["\u2028", "\x85"], ids=["line_separator", "next_line"])
def test_only_a_newline_ends_a_line(tmp_path: Path, tokenizer: Path, separator: str) -> None:
    lines = line(f"one{separator}two"), line()
    assert [p.tokens for p in PromptSet(prompt_file(tmp_path, *lines), tokenizer, 8).prompts] == [(2, 3), (2, 4, 3)]


def test_parity_rewards_an_even_sum_of_ids(tmp_path: Path, tokenizer: Path) -> None:
    file = prompt_file(tmp_path, line())
    by_parity, by_answer = PromptSet(file, tokenizer, 8, "parity"), PromptSet(file, tokenizer, 8)
    prompt = by_parity.prompts[0]
    assert [by_parity.reward(prompt, ids) for ids in ([2, 4], [2, 5], [7], [])] == [1.0, 0.0, 0.0, 1.0]
    assert by_answer.reward(prompt, [7]) == 1.0, "the twin: the answer's id is odd"
