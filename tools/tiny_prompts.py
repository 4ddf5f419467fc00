"""The prompts file: sums that the trained model gets right only sometimes, in an order that mixes every kind."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from rlk.train.data import extract_answer
from tools.tiny_model import EOS_ID, PAD_ID
from tools.tiny_sums import KINDS, Kind, Problem, draw

log = logging.getLogger(__name__)

# The file repeats these four. So any four neighbours hold both kinds, and among the greedy answers one that is right
# and one that is wrong: with one greedy sample a prompt, the baseline is the batch's mean. None: either will do.
CYCLE: tuple[tuple[Kind, bool | None], ...] = (("plain", True), ("worked", None), ("plain", False), ("worked", None))
PROMPTS = 256
CANDIDATES: Mapping[Kind, int] = {"plain": 2048, "worked": 960}  # plain ones of middling difficulty are rarer
# Samples at the first temperature, and as many at the second of the sums that then look middling: so neither luck nor
# one temperature decides. The file keeps those with nearest to 8 right of the 16.
SAMPLES = 8
TEMPERATURES = (1.0, 0.7)
MIDDLING = range(2, 7)  # right answers of the first samples: neither hopeless nor settled
PROMPT_TOKENS = range(5, 31)
RESPONSE_TOKENS = 64
ROWS = 256


@dataclass(frozen=True)
class Outcome:
    """A middling problem: how many of its 16 sampled answers were right, and whether the greedy one was."""

    problem: Problem
    right: int
    greedy: bool


def choose(model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int) -> list[Problem]:
    """The 256 problems whose share of right answers is nearest to one half, in the order of the cycle.

    Raises ValueError where a class has too few middling ones: the model learnt too little or too much.
    """
    rng = random.Random(f"prompts {seed}")
    torch.manual_seed(seed)
    outcomes = [o for kind in KINDS for o in _outcomes(model, tokenizer, _candidates(tokenizer, rng, kind))]
    queues = {key: iter(_nearest(outcomes, *key)) for key in dict.fromkeys(CYCLE)}
    return [next(queues[CYCLE[place % len(CYCLE)]]) for place in range(PROMPTS)]


def _nearest(outcomes: Sequence[Outcome], kind: Kind, greedy: bool | None) -> list[Problem]:
    """As many of one class as the file needs, those nearest to one half, in the order they were drawn."""
    needed = PROMPTS * CYCLE.count((kind, greedy)) // len(CYCLE)
    found = [o for o in outcomes if o.problem.kind == kind and greedy in (None, o.greedy)]
    log.info("%s, greedy right %s: %d middling, %d needed", kind, greedy, len(found), needed)
    if len(found) < needed:
        raise ValueError(
            f"{len(found)} {kind} sums (greedy right: {greedy}) are of middling difficulty, {needed} are needed:"
            " change --steps or --seed"
        )
    nearest = sorted(range(len(found)), key=lambda index: abs(found[index].right - SAMPLES))[:needed]
    return [found[index].problem for index in sorted(nearest)]


def write(problems: Sequence[Problem], path: Path) -> None:
    """One JSON object a line, with ``prompt`` and ``label``."""
    path.write_text("".join(json.dumps({"prompt": p.prompt, "label": p.label}) + "\n" for p in problems))


def sample(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str], temperature: float
) -> list[list[int]]:
    """One response a prompt, with its EOS where it has one; ``temperature`` 0 is greedy. No other sampling rule."""
    responses: list[list[int]] = []
    for start in range(0, len(prompts), ROWS):
        rows = [tokenizer.encode(prompt).ids for prompt in prompts[start : start + ROWS]]
        width = max(map(len, rows))
        padded = model.generate(
            input_ids=torch.tensor([[PAD_ID] * (width - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
            max_new_tokens=RESPONSE_TOKENS,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0 if temperature > 0 else None,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )[:, width:].tolist()
        responses += [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in padded]
    return responses


def _candidates(tokenizer: Tokenizer, rng: random.Random, kind: Kind) -> list[Problem]:
    """Different problems of one kind, with prompts of 5 to 30 tokens."""
    found: dict[str, Problem] = {}
    while len(found) < CANDIDATES[kind]:
        problem = draw(rng, kind)
        if len(tokenizer.encode(problem.prompt).ids) in PROMPT_TOKENS:
            found.setdefault(problem.prompt, problem)
    return list(found.values())


def _outcomes(model: Qwen3ForCausalLM, tokenizer: Tokenizer, problems: list[Problem]) -> list[Outcome]:
    """What the model makes of each problem; those that do not look middling are left out."""
    first = _counts(model, tokenizer, problems, TEMPERATURES[0])
    log.info("%s: %.3f right", problems[0].kind, sum(first) / (SAMPLES * len(problems)))
    kept = [(problem, count) for problem, count in zip(problems, first, strict=True) if count in MIDDLING]
    again = [problem for problem, _ in kept]
    second = _counts(model, tokenizer, again, TEMPERATURES[1])
    greedy = _right(model, tokenizer, again, temperature=0.0)
    return [Outcome(p, a + b, best) for (p, a), b, best in zip(kept, second, greedy, strict=True)]


def _counts(model: Qwen3ForCausalLM, tokenizer: Tokenizer, problems: list[Problem], temperature: float) -> list[int]:
    """How many of each problem's sampled answers are right."""
    repeated = [problem for problem in problems for _ in range(SAMPLES)]
    right = _right(model, tokenizer, repeated, temperature)
    return [sum(right[start : start + SAMPLES]) for start in range(0, len(right), SAMPLES)]


def _right(model: Qwen3ForCausalLM, tokenizer: Tokenizer, problems: list[Problem], temperature: float) -> list[bool]:
    responses = sample(model, tokenizer, [problem.prompt for problem in problems], temperature)
    answers = [extract_answer(tokenizer.decode(ids, skip_special_tokens=True)) for ids in responses]
    return [answer == problem.label for answer, problem in zip(answers, problems, strict=True)]
