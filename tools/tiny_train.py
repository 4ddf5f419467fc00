"""Supervised training of the tiny model on sums, in fp32, on one thread."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from tools.tiny_model import EOS_ID, PAD_ID
from tools.tiny_sums import KINDS, Problem, draw

log = logging.getLogger(__name__)

POOL = 2048  # problems sorted by length at a time: batches then hold next to no padding
BATCH_TOKENS = 1024
PEAK_LR = 3e-3
WARM_UP = 50
IGNORED = -100  # cross_entropy's own default


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, steps: int) -> None:
    """AdamW with warm-up and cosine decay to a tenth; the loss covers the answer and its EOS, not the question."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step, (ids, targets) in zip(range(steps), batches(tokenizer, seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = _lr(step, steps)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0 or step == steps - 1:
            log.info("step %d of %d: loss %.4f", step, steps, loss.item())
    model.eval()


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, targets), both int64 [rows, tokens], right-padded: causal attention never sees the padding."""
    rng = random.Random(f"train {seed}")
    while True:
        pool = [_encode(tokenizer, draw(rng, kind)) for kind in KINDS for _ in range(POOL // len(KINDS))]
        pool.sort(key=lambda pair: len(pair[0]))
        groups = list(_grouped(pool))
        rng.shuffle(groups)
        yield from map(_padded, groups)


def _encode(tokenizer: Tokenizer, problem: Problem) -> tuple[list[int], list[int]]:
    prompt, answer = tokenizer.encode(problem.prompt).ids, [*tokenizer.encode(problem.answer).ids, EOS_ID]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def _grouped(pool: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Cuts a pool sorted by length so that rows x longest row stays within the token budget."""
    group: list[tuple[list[int], list[int]]] = []
    for pair in pool:
        if group and (len(group) + 1) * len(pair[0]) > BATCH_TOKENS:
            yield group
            group = []
        group.append(pair)
    yield group


def _padded(group: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in group)
    ids = [row + [PAD_ID] * (width - len(row)) for row, _ in group]
    targets = [row + [IGNORED] * (width - len(row)) for _, row in group]
    return torch.tensor(ids), torch.tensor(targets)


def _lr(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP)
    return PEAK_LR * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
