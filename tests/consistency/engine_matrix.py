"""matrices/engine.yaml as the tests read it, and the requests that its lines are about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlk.plan.cells import read_matrix
from rlk.plan.derive import Plan
from rlk.plan.sampling import Sampling
from rlk.rollout.messages import Request
from tests.consistency.engines import MIX, NEW, PAGE, VOCABULARY, make_plan

PATH = Path(__file__).parents[2] / "matrices" / "engine.yaml"
ALL_ENGINES = 8
BATCH = 24
PAGES = {"few": 11, "plenty": 512}  # few: the least that vLLM takes for one sequence of 160 tokens
WHOLE = 4096  # tokens of a step that takes every prompt of a crowd
ROOM = 1024  # KV pages for the longest crowd three times over
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
Marks = tuple[Literal["full"], ...]


class Schedule(BaseModel):
    """How one batch is cut, cached, thrown out of the cache, and shared among engines."""

    model_config = _STRICT

    budget: int = Field(ge=16)
    cache: Literal["cold", "warm"]
    pages: Literal["few", "plenty"]
    engines: Literal[1, 2, 8]
    marks: Marks = ()

    @property
    def id(self) -> str:
        """The columns, joined."""
        return f"budget{self.budget}-{self.cache}-{self.pages}-engines{self.engines}"

    def plan(self, model: Path, mode: Literal["consistency", "native"] = "consistency") -> Plan:
        """The plan of each of its engines."""
        return make_plan(model, budget=self.budget, pages=PAGES[self.pages], mode=mode, seqs=16, engines=self.engines)


class Crowd(BaseModel):
    """How many requests share a step of one engine, and the places of those that are thrown out of its cache."""

    model_config = _STRICT

    requests: int = Field(ge=1, le=64)
    budget: int = WHOLE
    pages: int = ROOM
    preempted: tuple[int, ...] = ()
    marks: Marks = ()

    @property
    def id(self) -> str:
        """The number of requests."""
        return f"crowd{self.requests}"

    def plan(self, model: Path, mode: Literal["consistency", "native"] = "consistency") -> Plan:
        """The plan of its engine."""
        return make_plan(model, budget=self.budget, pages=self.pages, mode=mode, seqs=64, longest=max(NEEDLES.values()))


class EngineMatrix(BaseModel):
    """The file."""

    model_config = _STRICT

    format: Literal["rlk.engine/1"]
    schedules: tuple[Schedule, ...]
    crowds: tuple[Crowd, ...]


def load() -> EngineMatrix:
    """The file's content; raises ConfigErrors for any fault of it."""
    return read_matrix(PATH, EngineMatrix)


PROMPTS = (40, 1, 64, 17, 7, 69, 48, 8, 33, 65, 9, 68, 20, 50, 16, 41, 60, 15, 66, 2, 47, 32, 31, 62)
LIMITS = (NEW, NEW, NEW, 9, NEW, NEW, 8, 1, NEW, NEW, 7, NEW)
NEEDLES = {3: 16, 5: 257, 6: 2049}  # place in a crowd: tokens of its prompt


def make_batch(mix: Sequence[Sampling] = MIX) -> list[Request]:
    """24 prompts of 1 to 117 tokens, around the edges of 16 and 48 tokens; every second one starts with the same three
    pages. Responses may have 1, 7, 8, 9 or 24 tokens. The first request of each of 1, 2 or 8 engines fills a page."""
    rng = random.Random(1)
    common = _tokens(rng, 3 * PAGE)
    prompts = [(common if i % 2 else []) + _tokens(rng, PROMPTS[i]) for i in range(BATCH)]
    return [Request(i, i, p, mix[i % len(mix)], LIMITS[i % len(LIMITS)]) for i, p in enumerate(prompts)]


def make_crowd(requests: int, mix: Sequence[Sampling] = MIX) -> list[Request]:
    """The first so many of 64 requests: prompts of 5 to 40 tokens, and the needles."""
    rng = random.Random(2)
    prompts = [_tokens(rng, NEEDLES.get(i) or rng.randrange(5, 41)) for i in range(64)]
    return [Request(i, i, p, mix[i % len(mix)], NEW) for i, p in enumerate(prompts[:requests])]


def shares(requests: Sequence[Request], engines: int) -> list[list[Request]]:
    """What each engine gets: neighbours stay together, as they do in a run."""
    return [[r for i, r in enumerate(requests) if i * engines // len(requests) == e] for e in range(engines)]


def served_before(share: Sequence[Request]) -> list[Request]:
    """What warms an engine: every third of its requests, the first one last, so that few pages still hold it."""
    return list(reversed(share[::3]))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(12, VOCABULARY) for _ in range(count)]
