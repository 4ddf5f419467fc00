"""Processes that each hold one engine at a time, so that several engines are up at once.

They are kept between cells: vLLM's imports take longer than a cell does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from threading import Barrier, BrokenBarrierError
from typing import Any
from unittest import mock

from rlk.plan.derive import Plan
from rlk.rollout.engine import EngineRank
from rlk.rollout.messages import Request
from tests.consistency.engine_matrix import served_before, shares
from tests.consistency.engines import Outcome, joined, one_by_one, running, together

WAIT_S = 300


@dataclass
class Seen:
    """What vLLM's scheduler did: the most requests of one step, sample ids thrown out of the cache, and for those that
    came back the tokens that were computed then, over and above what the cache still held."""

    widest: int = 0
    preempted: list[int] = field(default_factory=list)
    resumed: list[tuple[int, int]] = field(default_factory=list)

    def note(self, step: Any) -> None:
        """One more step, as the scheduler returns it."""
        computed: Mapping[str, int] = step.num_scheduled_tokens
        self.widest = max(self.widest, len(computed))
        self.preempted += sorted(map(_sample, step.preempted_req_ids or ()))
        self.resumed += sorted((_sample(r), computed[r]) for r in step.scheduled_cached_reqs.resumed_req_ids)


def _sample(request: str) -> int:
    return int(request.partition("-")[0])


@dataclass(frozen=True)
class Part:
    """What one engine did, and its scheduler meanwhile; cached_first is the tokens of its first request that it held
    before it began."""

    pid: int
    outcome: Outcome
    seen: Seen
    cached_first: int


@dataclass(frozen=True)
class Run:
    """A batch over the engines that were up at once."""

    parts: tuple[Part, ...]

    @property
    def outcome(self) -> Outcome:
        """All samples, and the events of all engines."""
        return joined([part.outcome for part in self.parts])


class EnginePool:
    """Runs batches; `stop` ends its processes."""

    def __init__(self) -> None:
        self._spawn = get_context("spawn")
        self._manager = self._spawn.Manager()
        self._workers: list[ProcessPoolExecutor] = []

    def run(self, plan: Plan, requests: Sequence[Request], *, warm: bool = False) -> Run:
        """The batch over all engines of the plan."""
        barrier = self._manager.Barrier(plan.engines, timeout=WAIT_S)
        parts = shares(requests, plan.engines)
        futures = [self._submit(e, serve, plan, e, part, warm, barrier) for e, part in enumerate(parts)]
        errors = [error for future in futures if (error := future.exception(2 * WAIT_S))]
        for error in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
            raise error  # the cause, before what it did to the engines that waited
        return Run(tuple(future.result() for future in futures))

    def alone(self, plan: Plan, requests: Sequence[Request]) -> Outcome:
        """Each request alone in one engine that remembers none of the others."""
        outcome: Outcome = self._submit(0, serve_alone, plan, requests).result(WAIT_S)
        return outcome

    def stop(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.shutdown()
        self._manager.shutdown()

    def _submit(self, engine: int, work: Any, plan: Plan, *arguments: Any) -> Future[Any]:
        while len(self._workers) <= engine:
            self._workers.append(ProcessPoolExecutor(1, mp_context=self._spawn))
        with mock.patch.dict(os.environ, plan.engine_env):  # which a process reads once, when it starts
            return self._workers[engine].submit(work, plan, *arguments)


def serve(plan: Plan, engine: int, share: Sequence[Request], warm: bool, barrier: Barrier) -> Part:
    """In a process of the pool: one engine and its share of the batch, while the other engines are up."""
    try:
        with running(plan, engine) as live:
            if warm:
                together(live, served_before(share))
            barrier.wait()
            with watched(live) as seen:
                outcome = together(live, share)
            barrier.wait()
            return Part(os.getpid(), outcome, seen, int(outcome.arrays.cached_tokens[0]))
    except BaseException:
        barrier.abort()
        raise


def serve_alone(plan: Plan, requests: Sequence[Request]) -> Outcome:
    """In a process of the pool: see EnginePool.alone."""
    with running(plan) as live:
        return one_by_one(live, requests)


@contextmanager
def watched(engine: EngineRank) -> Iterator[Seen]:
    """Notes every step of vLLM's scheduler."""
    scheduler, seen = engine._live.engine_core.engine_core.scheduler, Seen()
    schedule = scheduler.schedule

    def noted(*arguments: Any) -> Any:
        step = schedule(*arguments)
        seen.note(step)
        return step

    with mock.patch.object(scheduler, "schedule", noted):
        yield seen
