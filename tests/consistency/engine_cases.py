"""The schedules of test_engine_events, one after the other in one child process, where an engine is up in a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.model import checkpoint
from rlk.model.layout import parameters
from rlk.model.parallel import ParallelContext
from rlk.plan.derive import derive
from rlk.plan.shape import read_shape
from rlk.rollout.engine import EngineRank
from rlk.rollout.messages import RolloutError
from tests.consistency.engines import NATIVE_MIX, Outcome, make_plan, make_requests, one_by_one, running, together

Words = dict[str, NDArray[np.uint16]]
WIDE, NARROW = 512, 24  # tokens a step: every prompt whole; or none, since 12 requests share them
FEW_PAGES = 24  # of 16 tokens: about a third of what the twelve sequences fill


@dataclass(frozen=True)
class Cases:
    """Outcomes by schedule, and what else was seen."""

    outcomes: dict[str, Outcome]
    fingerprints: dict[str, dict[str, tuple[int, int]]]
    readback: dict[str, Any]
    refusals: dict[str, str]
    leaking: dict[str, Any]
    after_reset: dict[str, int]


def stored_words(model: Path) -> Words:
    """What a trainer sends to the one rank of an engine: all stored parameters as bf16 words."""
    stored = checkpoint.load(model, parameters(read_shape(str(model))), ParallelContext())
    return {name: t.view(torch.uint16).numpy() for name, t in stored.items()}


def send(engine: EngineRank, words: Words, pieces: int) -> None:
    """The update in that many calls, uncommitted."""
    names = list(words)
    for part in np.array_split(np.arange(len(names)), pieces):
        engine.load({names[i]: words[names[i]] for i in part})


def run_cases(first: Path, second: Path) -> Cases:
    """Every schedule on the weights of `first`; updates lead to those of `second`."""
    requests = make_requests()
    cases = Cases({}, {}, {}, {}, {}, {})
    with running(make_plan(first, budget=WIDE)) as engine:
        cases.outcomes["alone"] = one_by_one(engine, requests)
        engine.commit(0)
        cases.outcomes["together"] = together(engine, requests)
        cases.outcomes["warm"] = together(engine, requests)
        cases.readback.update(engine.read_back())
        _updates(engine, first, second, cases)
    for name, budget, pages in (("chunked", NARROW, 512), ("preempted", WIDE, FEW_PAGES)):
        with running(make_plan(first, budget=budget, pages=pages)) as engine:
            cases.outcomes[name] = together(engine, requests)
    with running(make_plan(second, budget=WIDE)) as engine:
        cases.outcomes["fresh engine"] = together(engine, requests)
        cases.fingerprints["fresh engine"] = engine.fingerprint()
    with running(make_plan(first, budget=NARROW, mode="native")) as engine:
        cases.outcomes["native together"] = together(engine, make_requests(NATIVE_MIX))
        engine.reset(engine.plan.to_json())
        cases.outcomes["native after reset"] = together(engine, make_requests(NATIVE_MIX))
        engine.reset(engine.plan.to_json())
        cases.outcomes["native alone"] = one_by_one(engine, make_requests(NATIVE_MIX))
    return cases


def _updates(engine: EngineRank, first: Path, second: Path, cases: Cases) -> None:
    requests, same, other = make_requests(), stored_words(first), stored_words(second)
    cases.fingerprints["start"] = engine.fingerprint()
    for pieces in (1, 2, len(same)):
        send(engine, {name: np.zeros_like(w) for name, w in same.items()}, 1)
        cases.fingerprints["zeros"] = engine.fingerprint()
        send(engine, same, pieces)
        engine.commit(0)
        cases.fingerprints[f"{pieces} pieces"] = engine.fingerprint()
    cases.outcomes["same weights again"] = together(engine, requests)
    engine._rpc("load_stored", other)  # as a driver would that forgets the cache: the engine's own guard is not told
    cases.outcomes["stale cache"] = together(engine, requests)
    send(engine, other, 1)
    for name, version in (("uncommitted", 0), ("other version", 2)):
        try:
            engine.generate(0, requests, version)
        except RolloutError as error:
            cases.refusals[name] = str(error)
        engine.commit(1)
    cases.outcomes["first after update"] = together(engine, requests[1:2], 1)
    engine.commit(1)
    cases.outcomes["updated"] = together(engine, requests, 1)
    cases.fingerprints["updated"] = engine.fingerprint()
    config = engine._vllm.model_config
    config.generation_config = "auto"  # vLLM's default: what the checkpoint would add to every request
    cases.leaking.update(config.get_diff_sampling_param())
    other_seed = engine.plan.config.model_copy(update={"seed": 8})
    engine.reset(derive(other_seed, engine.plan.profile, engine.plan.shape).to_json())
    cases.outcomes["other seed"] = together(engine, requests)
    engine.reset(make_plan(first, budget=WIDE).to_json())
    cases.after_reset.update(engine.counters())
    cases.outcomes["after reset"] = together(engine, requests)
    cases.fingerprints["after reset"] = engine.fingerprint()
