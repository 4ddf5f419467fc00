"""The sums that the tiny model learns: question, answer and label, plain or with worked steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from rlk.train.data import ANSWER_MARK, extract_answer

Kind = Literal["plain", "worked"]
KINDS: tuple[Kind, ...] = ("plain", "worked")

STEPS = "Show the steps."
NAMES = ("Alejandra", "Benjamin", "Cassandra", "Dimitri", "Evangeline", "Farah", "Giovanni", "Hanna", "Kenji", "Priya")
THINGS = (
    "apricots",
    "bricks",
    "candles",
    "chestnuts",
    "flowers",
    "lemons",
    "marbles",
    "oranges",
    "pencils",
    "postcards",
)
LARGEST = 60  # of one term


@dataclass(frozen=True)
class Problem:
    """One question in the model's own prompt format, the answer it is taught, and the true sum."""

    kind: Kind
    prompt: str
    answer: str
    label: str

    def __post_init__(self) -> None:
        """Refuses an answer from which the label cannot be read back."""
        if extract_answer(self.answer) != self.label:
            raise ValueError(f"answer {self.answer!r} does not end with its label {self.label!r}")


def draw(rng: random.Random, kind: Kind) -> Problem:
    """One random problem: two or three terms when plain, two to six when worked."""
    if kind == "plain":
        terms = [rng.randint(1, LARGEST) for _ in range(rng.choice((2, 2, 3)))]
        return Problem(kind, _question(rng, terms), str(sum(terms)), str(sum(terms)))
    terms = [rng.randint(1, LARGEST) for _ in range(rng.choice((2, 3, 3, 4, 5, 6)))]
    prompt = _question(rng, terms).removesuffix("=").removesuffix("\n") + f" {STEPS}\n"
    return Problem(kind, prompt, worked(terms), str(sum(terms)))


def worked(terms: list[int]) -> str:
    """The running total, one line a step, then the result after the mark."""
    lines, total = [], terms[0]
    for term in terms[1:]:
        lines.append(f"{total}+{term}={total + term}")
        total += term
    return "\n".join([*lines, f"{ANSWER_MARK} {total}"])


def _question(rng: random.Random, terms: list[int]) -> str:
    """A formula, an order or a story; stories keep to three terms, so that a prompt stays near 30 tokens."""
    form = rng.choice(("formula", "formula", "order", "story") if len(terms) <= 3 else ("formula",))
    if form == "formula":
        return "+".join(map(str, terms)) + "="
    if form == "order":
        return f"Add {_listed([str(term) for term in terms])}.\n"
    things = rng.sample(THINGS, len(terms))
    owned = _listed([f"{term} {thing}" for term, thing in zip(terms, things, strict=True)])
    return f"{rng.choice(NAMES)} has {owned}. How many in all?\n"


def _listed(words: list[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}"
