"""A small random model, plans of one-rank engines around it, and the schedules that tests/consistency compares.

Random weights and not the trained ones: every logit is in play, so that a changed bit moves a sampled token soon. The
vocabulary of 401 is no multiple of anything, so that padding is real. Ten of its ids end a response, so that a few of
the twelve responses stop early. The checkpoint carries a generation_config.json that must not leak.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

from rlk.driver.ports import ReservedPorts
from rlk.evidence.arrays import RolloutArrays
from rlk.model.layout import parameters
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.profile import Profile
from rlk.plan.sampling import Sampling
from rlk.plan.shape import ModelShape, read_shape
from rlk.rollout.engine import EngineRank
from rlk.rollout.messages import Request

T = TypeVar("T")

VOCABULARY, EOS, LEAKED_EOS = 401, list(range(2, 12)), list(range(100, 300))
PAGE = 16
NEW = 24  # response tokens: enough to leave the page a prompt ended on
MIX = (Sampling(0.0), Sampling(0.7, 0.95), Sampling(1.3, 0.99, 20), Sampling(1.0), Sampling(0.005, 0.9))
NATIVE_MIX = MIX[:4]  # vLLM's own sampler would lift the last one's temperature

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}
LEAK = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "eos_token_id": LEAKED_EOS}


def write_checkpoint(folder: Path, seed: int) -> Path:
    """A Hugging Face checkpoint with seeded random weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(LEAK))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for param in parameters(read_shape(str(folder))):
        for t in param.tensors:
            noise = torch.randn(t.shape, generator=generator)
            tensors[t.hf_name] = (1 + 0.1 * noise if len(t.shape) == 1 else 0.08 * noise).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def page_bytes(shape: ModelShape) -> int:
    """Bytes of one KV page on the one rank of an engine."""
    return PAGE * shape.kv_bytes(1, 1)


def make_plan(
    model: Path,
    *,
    budget: int,
    pages: int = 512,
    mode: Literal["consistency", "native"] = "consistency",
    seqs: int = 12,
    engines: int = 1,
    longest: int = 136,
) -> Plan:
    """Engines of one rank: `budget` tokens and `seqs` requests a step, `pages` KV pages, prompts up to `longest`."""
    shape = read_shape(str(model))
    profile = Profile.model_validate(
        {
            "name": "events",
            "origin": "events",
            "device": "cpu",
            "model": str(model),
            "prompts": os.devnull,
            "max_prompt_len": longest,
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "engine": {
                "max_engines": engines,
                "kv_cache_bytes": pages * page_bytes(shape),
                "max_num_seqs": seqs,
                "max_num_batched_tokens": budget,
                "block_size": PAGE,
            },
        }
    )
    return derive(RunConfig(mode=mode, max_response_len=NEW, seed=7), profile, shape)


def make_requests(mix: Sequence[Sampling] = MIX) -> list[Request]:
    """Twelve prompts of 5 to 117 tokens; every second one starts with the same 48: three pages for the prefix cache."""
    rng = random.Random(0)
    common = [rng.randrange(3, VOCABULARY) for _ in range(3 * PAGE)]
    own = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(5, 70))] for _ in range(12)]
    return [Request(i, i, (common if i % 2 else []) + tokens, mix[i % len(mix)], NEW) for i, tokens in enumerate(own)]


@dataclass(frozen=True)
class Outcome:
    """What a schedule generated, and the events that happened meanwhile."""

    arrays: RolloutArrays
    events: dict[str, int]

    @property
    def words(self) -> tuple[bytes, bytes, bytes]:
        """What must not change with the schedule: tokens, log-probs and lengths, as bytes."""
        a = self.arrays
        return a.tokens.tobytes(), a.logprobs.view(np.uint32).tobytes(), a.response_len.tobytes()


@contextmanager
def running(plan: Plan, number: int = 0) -> Iterator[EngineRank]:
    """A started one-rank engine in this process, which must have the plan's environment."""
    ports = ReservedPorts(1)
    engine = EngineRank(plan.to_json(), number, 0, 1, *ports.numbers)
    engine.start()
    ports.release()
    try:
        yield engine
    finally:
        engine.stop()


def together(engine: EngineRank, requests: Sequence[Request], version: int = 0) -> Outcome:
    """All requests at once."""
    before = engine.counters()
    arrays = engine.generate(0, requests, version).arrays
    return Outcome(arrays, {name: count - before[name] for name, count in engine.counters().items()})


def one_by_one(engine: EngineRank, requests: Sequence[Request]) -> Outcome:
    """Each request alone, with nothing cached of the ones before."""
    parts = []
    for request in requests:
        engine.commit(0)
        parts.append(together(engine, [request]))
    return joined(parts)


def joined(parts: Sequence[Outcome]) -> Outcome:
    """Samples one after the other, and the sums of the events."""
    columns = {name: [getattr(p.arrays, name) for p in parts] for name in parts[0].arrays.columns()}
    arrays = replace(parts[0].arrays, **{name: np.concatenate(pieces) for name, pieces in columns.items()})
    return Outcome(arrays, {name: sum(p.events[name] for p in parts) for name in parts[0].events})


def in_child(work: Callable[..., T], *arguments: Any, environment: dict[str, str], timeout_s: int) -> T:
    """work(*arguments) in a fresh process: vLLM patches torch, and reads its environment once."""
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result(timeout_s)
