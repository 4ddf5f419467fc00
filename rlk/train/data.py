"""Prompts, and the reward of an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

ANSWER_MARK = "####"


class DataError(RuntimeError):
    """The prompts cannot be used; the message names the file and the line."""


@dataclass(frozen=True)
class Prompt:
    """One line of the data set: its index there, its token ids, and the answer that earns the reward."""

    index: int
    tokens: tuple[int, ...]
    label: str


def extract_answer(text: str) -> str:
    """The text after the last "####", as the usual math sets mark it, or the whole text; stripped of white space."""
    return text.rpartition(ANSWER_MARK)[2].strip()


class PromptSet:
    """A JSONL file of {"prompt", "label"} and the tokenizer of the model. Token ids travel from here on, never text."""

    def __init__(
        self, path: Path, tokenizer: Path, max_prompt_len: int, reward: Literal["answer", "parity"] = "answer"
    ) -> None:
        """Reads and encodes all prompts.

        Raises:
            DataError: a line is not such an object, or a prompt is empty or longer than max_prompt_len tokens.
        """
        self._tokenizer, self._reward = Tokenizer.from_file(str(tokenizer)), reward
        self.prompts: list[Prompt] = []
        with path.open(encoding="utf-8") as lines:  # str.splitlines would also cut at U+2028 and others within a text
            for number, line in enumerate(lines, 1):
                self.prompts.append(self._prompt(f"{path}:{number}", line, max_prompt_len))
        if not self.prompts:
            raise DataError(f"{path}: no prompts; give one JSON object a line with prompt and label")

    def _prompt(self, where: str, line: str, limit: int) -> Prompt:
        try:
            entry = json.loads(line)
            text, label = entry["prompt"], entry["label"]
            if not isinstance(text, str):
                raise TypeError(f"prompt is {text!r}")
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{where}: not a JSON object with prompt and label ({error!r})") from error
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not 1 <= len(tokens) <= limit:
            raise DataError(f"{where}: the prompt has {len(tokens)} tokens; allowed are 1 to {limit} (max_prompt_len)")
        return Prompt(len(self.prompts), tokens, str(label))

    def batch(self, step: int, count: int, seed: int) -> list[Prompt]:
        """The prompts of a step: the file's order, round and round, from a place that the seed decides.

        Neighbours stay neighbours, since a file may be laid out so that each step meets every kind of prompt.
        """
        size = len(self.prompts)
        first = random.Random(seed).randrange(size) + step * count
        return [self.prompts[place % size] for place in range(first, first + count)]

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """1 for an exact match of the answer, else 0; under `parity`, 1 for token ids with an even sum."""
        if self._reward == "parity":
            return float(sum(response) % 2 == 0)
        text = self._tokenizer.decode(list(response), skip_special_tokens=True)
        return float(extract_answer(text) == prompt.label.strip())
