"""Every line of matrices/engine.yaml gives the bytes that each request gets alone, and its events did happen.

Live one-rank engines of vLLM, as many processes as the line has engines, all up at once. The reference is one engine
that serves request after request, whole and with nothing cached. The twins fail the same comparison: ordinary
operators, greedy, so that only arithmetic can differ, when a batch is cut and shared; and in a crowd the stock sampler,
whose one generator all requests of a step draw from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from rlk.driver.provenance import revision
from rlk.plan.sampling import Sampling
from tests.consistency.engine_matrix import BATCH, NEEDLES, WHOLE, Crowd, Schedule, load, make_batch, make_crowd
from tests.consistency.engine_pool import EnginePool, Run
from tests.consistency.engines import NATIVE_MIX, PAGE, Outcome, write_checkpoint
from tests.consistency.reference import split
from tests.engine_evidence import Row

pytestmark = pytest.mark.cpu

MATRIX = load()
QUIET = ("chunks", "cached_tokens", "preemptions")
GREEDY = (Sampling(0.0),)
Report = Callable[[Row], None]


@dataclass(frozen=True)
class Found:
    """A line and what it gave."""

    line: Schedule | Crowd
    run: Run
    seconds: float

    def row(self, reference: Outcome) -> Row:
        """What the evidence keeps of it."""
        outcome, mismatches = self.run.outcome, mismatching(self.run.outcome, reference)
        return Row(
            id=self.line.id,
            engines=len(self.run.parts),
            requests=len(outcome.arrays.sample_id),
            tokens=len(outcome.arrays.tokens),
            mismatches=mismatches,
            events={name: outcome.events[name] for name in ("steps", *QUIET)},
            widest_step=max(part.seen.widest for part in self.run.parts),
            seconds=self.seconds,
            digest=sha256(b"".join(outcome.words)).hexdigest(),
            passed=outcome.words == reference.words and mismatches == 0,
            revision=revision(),
        )


def mismatching(found: Outcome, expected: Outcome) -> int:
    """Tokens of the longer response whose id or log-prob word is another, or is missing."""
    sides = [
        zip(split(a.tokens, a.response_len), split(a.logprobs.view(np.uint32), a.response_len), strict=True)
        for a in (found.arrays, expected.arrays)
    ]
    count = 0
    for (tokens, words), (their_tokens, their_words) in zip(*sides, strict=True):
        n = min(len(tokens), len(their_tokens))
        count += int(((tokens[:n] != their_tokens[:n]) | (words[:n] != their_words[:n])).sum())
        count += max(len(tokens), len(their_tokens)) - n
    return count


def parameters(lines: Sequence[Schedule | Crowd]) -> list[object]:
    return [pytest.param(x, id=x.id, marks=[getattr(pytest.mark, name) for name in x.marks]) for x in lines]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "random", 0)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    made = EnginePool()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def batch_alone(pool: EnginePool, model: Path) -> Outcome:
    plan = Schedule(budget=2048, cache="cold", pages="plenty", engines=1).plan(model)
    return pool.alone(plan, make_batch())


@pytest.fixture(scope="module")
def crowd_alone(pool: EnginePool, model: Path) -> Outcome:
    return pool.alone(Crowd(requests=1).plan(model), make_crowd(64))


@pytest.fixture(scope="module", params=parameters(MATRIX.schedules))
def scheduled(request: pytest.FixtureRequest, pool: EnginePool, model: Path) -> Found:
    line: Schedule = request.param
    start = time.monotonic()
    run = pool.run(line.plan(model), make_batch(), warm=line.cache == "warm")
    return Found(line, run, round(time.monotonic() - start, 1))


@pytest.fixture(scope="module", params=parameters(MATRIX.crowds))
def crowded(request: pytest.FixtureRequest, pool: EnginePool, model: Path) -> Found:
    line: Crowd = request.param
    start = time.monotonic()
    run = pool.run(line.plan(model), make_crowd(line.requests))
    return Found(line, run, round(time.monotonic() - start, 1))


def first(outcome: Outcome, requests: int) -> Outcome:
    """The outcome of the first so many requests."""
    a = outcome.arrays
    tokens, prompts = int(a.response_len[:requests].sum()), int(a.prompt_len[:requests].sum())
    size = {"tokens": tokens, "mask": tokens, "logprobs": tokens, "prompt_tokens": prompts}
    return replace(outcome, arrays=replace(a, **{n: c[: size.get(n, requests)] for n, c in a.columns().items()}))


def test_requests_alone_met_no_event(batch_alone: Outcome, crowd_alone: Outcome) -> None:
    for outcome in (batch_alone, crowd_alone):
        assert [outcome.events[name] for name in QUIET] == [0, 0, 0]


def test_batch_holds_the_lengths_it_is_about(batch_alone: Outcome) -> None:
    a = batch_alone.arrays
    assert {1, 7, 8, 9, 24} <= set(a.response_len.tolist())
    assert {PAGE - 1, PAGE, PAGE + 1} <= {n % (3 * PAGE) for n in a.prompt_len.tolist()}
    assert len(a.sample_id) == BATCH


def test_schedule_changes_no_byte(scheduled: Found, batch_alone: Outcome, engine_report: Report) -> None:
    row = scheduled.row(batch_alone)
    engine_report(row)
    assert row.mismatches == 0
    assert scheduled.run.outcome.words == batch_alone.words


def test_schedule_had_its_events(scheduled: Found) -> None:
    line, parts = scheduled.line, scheduled.run.parts
    assert isinstance(line, Schedule)
    assert len({part.pid for part in parts}) == line.engines, "each engine is a process, and all were up at once"
    assert (scheduled.run.outcome.events["preemptions"] > 0) == (line.pages == "few")
    for part in parts:
        assert (part.outcome.events["chunks"] > 0) == (line.budget < 2048)
        assert (part.cached_first > 0) == (line.cache == "warm"), "nothing of this batch was there before its first"


def test_crowd_changes_no_byte(crowded: Found, crowd_alone: Outcome, engine_report: Report) -> None:
    assert isinstance(crowded.line, Crowd)
    reference = first(crowd_alone, crowded.line.requests)
    row = crowded.row(reference)
    engine_report(row)
    assert row.mismatches == 0
    assert crowded.run.outcome.words == reference.words


def test_crowd_shared_one_step(crowded: Found) -> None:
    line, (part,) = crowded.line, crowded.run.parts
    assert isinstance(line, Crowd)
    assert part.seen.widest == line.requests
    assert (part.outcome.events["chunks"] > 0) == (line.budget < WHOLE)
    assert part.outcome.events["preemptions"] == len(line.preempted)
    assert part.seen.preempted == list(line.preempted), "nobody else left"
    assert [place for place, _ in part.seen.resumed] == list(line.preempted), "and each came back"
    lengths = part.outcome.arrays.prompt_len.tolist()
    assert all(lengths[place] == tokens for place, tokens in NEEDLES.items() if place < len(lengths))


def test_ordinary_operators_fail_when_a_batch_is_cut_and_shared(pool: EnginePool, model: Path) -> None:
    line = Schedule(budget=32, cache="warm", pages="plenty", engines=2)
    plan, requests = line.plan(model, "native"), make_batch(GREEDY)
    assert mismatching(pool.run(plan, requests, warm=True).outcome, pool.alone(plan, requests)) > 0


def test_stock_sampler_fails_in_a_crowd(pool: EnginePool, model: Path) -> None:
    plan, requests = Crowd(requests=8).plan(model, "native"), make_crowd(8, NATIVE_MIX)
    assert mismatching(pool.run(plan, requests).outcome, pool.alone(plan, requests)) > 0


def test_one_wrong_word_is_one_mismatch(batch_alone: Outcome) -> None:
    words = batch_alone.arrays.logprobs.view(np.uint32).copy()
    words[-1] ^= 1
    wrong = replace(batch_alone, arrays=replace(batch_alone.arrays, logprobs=words.view(np.float32)))
    assert mismatching(wrong, batch_alone) == 1
    assert wrong.words != batch_alone.words
