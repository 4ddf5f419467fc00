"""Sampled ids reach the trainer as they are, also where decoding and encoding them again would give other ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from rlk.driver.step import _train_samples
from tests.unit.evidence_builder import make_draft

TOKENIZER = Path(__file__).parents[2] / "assets" / "tiny-qwen3" / "tokenizer.json"


def test_ids_that_no_encoder_gives_are_trained_as_sampled() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    letters = [tokenizer.token_to_id(letter) for letter in "Show"]
    assert len(tokenizer.encode(tokenizer.decode(letters)).ids) < len(letters), "the round trip joins them"
    draft = make_draft()
    step = draft.steps[0]
    step.rollouts[0]["tokens"][:4] = letters  # the first row of engine 0 is sample 2, which has four
    trained = {s.sample_id: s.tokens[s.prompt_len :] for s in _train_samples(draft.plan, 0, step.samples)}
    assert trained[2] == tuple(letters)
