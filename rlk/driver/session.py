"""A session: Ray, one trainer and its engines, started once. It makes many runs; between them it is reset to the
initial state of the same or of another topology."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlk.driver.cluster import Cluster
from rlk.driver.errors import RunError
from rlk.driver.gpus import visible_gpus
from rlk.driver.groups import Engines, Trainer
from rlk.driver.manifest import Said
from rlk.driver.oracle import Oracle
from rlk.driver.progress import Watch
from rlk.driver.step import StepRunner
from rlk.driver.waiting import collect
from rlk.evidence.ray_status import CLEAN_CAUSES, Actor, RayStatus
from rlk.evidence.writer import RunWriter
from rlk.model.layout import stored_bytes
from rlk.model.seeded import ensure_weights
from rlk.plan.derive import Plan
from rlk.train.data import PromptSet

log = logging.getLogger(__name__)


class Session:
    """Processes of one profile. Use as a context manager: leaving it ends every process that it started."""

    def __init__(self, plan: Plan, cluster: Cluster | None = None) -> None:
        self.plan = plan
        self.cluster = cluster or _cluster_for(plan)
        self._fresh, self._sound = True, True
        self._ended: tuple[Actor, ...] | None = None

    def start(self, watch: Watch) -> None:
        """Starts all processes and waits until every one of them is ready.

        Raises:
            RunError: names who failed or did not come in time.
        """
        profile = self.plan.profile
        if profile.weights_seed is not None:
            watch.phase(None, "drawing random weights where there are none")
            ensure_weights(Path(profile.model), self.plan.shape, profile.weights_seed)
        watch.phase(None, "starting Ray")
        self.cluster.start()
        watch.phase(
            None, f"starting {self.plan.ranks} train ranks, {self.plan.engines} x {self.plan.engine_ranks} engine ranks"
        )
        self.trainer, self.engines = Trainer(self.cluster, self.plan), Engines(self.cluster, self.plan)
        starting = self.engines.starting() | self.trainer.starting()
        self.oracle = Oracle(self.plan)  # its imports take seconds, in which this process would only wait
        self._take(starting, "start")

    def _take(self, starting: Mapping[str, Any], stage: str) -> None:
        """Waits for ranks and notes which process has which role."""
        for role, readback in collect(starting, self.plan.profile.timeouts.start_s, stage).items():
            self.cluster.ledger.name(readback.get("pid") or readback["process"]["pid"], role)
        self.engines.met()
        self.cluster.ledger.record_children()

    def reset(self, plan: Plan) -> None:
        """Back to the initial state, byte for byte, for a run of another plan. For another topology, mode or limit the
        processes stay and take new places.

        Raises:
            RunError: the session cannot serve this plan.
        """
        if not self.serves(plan):
            why = "is of another profile" if self._sound else "comes after a run that did not end well"
            raise RunError(f"{plan.cell} {why}: it needs a session of its own")
        before, self.plan = self.plan, plan
        if self._fresh and plan == before:
            return
        self.cluster.ledger.rename(list(self.cluster.handles), "left")  # until each says below which one it is now
        self._take(self.engines.moving(plan) | self.trainer.moving(plan), "reset")
        self._fresh = True

    def serves(self, plan: Plan) -> bool:
        """Whether `reset` can take this plan: it is of the same profile, but for the limits of an engine, and the last
        run came to its end."""
        known = self.plan.profile.model_copy(update={"engine": plan.profile.engine})
        return self._sound and plan.profile == known

    def run(self, writer: RunWriter, watch: Watch) -> Said:
        """All steps of the plan, from the initial state; returns what the processes said of themselves after the
        last."""
        if not self._fresh:
            raise RunError("the session holds the weights of an earlier run: reset it first")
        self._fresh, self._sound = False, False
        profile = self.plan.profile
        tokenizer = Path(profile.model) / "tokenizer.json"
        data = PromptSet(Path(profile.prompts), tokenizer, profile.max_prompt_len, profile.reward)
        self.oracle.serve(self.plan)
        steps = StepRunner(self.plan, self.trainer, self.engines, data, self.oracle, writer, watch)
        steps.initial_weights()
        for step in range(self.plan.config.steps):
            steps.run(step)
        watch.phase(None, "reading settings back")
        said = Said(self.trainer.proofs(), self.trainer.read_back(), self.engines.read_back())
        self._sound = True
        return said

    def status(self, error: str | None) -> RayStatus:
        """What Ray says of every actor: how it ended, or that it lives."""
        actors = self._ended if self._ended is not None else self.cluster.actors()
        good = error is None and all(a.state == "ALIVE" or a.cause in CLEAN_CAUSES for a in actors)
        return RayStatus("SUCCEEDED" if good else "FAILED", actors)

    def stop(self) -> None:
        """Asks every actor to leave, notes how it ended, then ends every process that the session started."""
        try:
            if self._ended is None and self.cluster.handles:
                self._ended = self.cluster.leave()
        finally:
            self.cluster.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()


def _cluster_for(plan: Plan) -> Cluster:
    """A Ray of this session's own, with room for the trainer's ranks and for the most that engines use."""
    gpus = visible_gpus(os.environ) if plan.profile.device == "cuda" else ()
    used = [str(gpu.index) for gpu in gpus[: plan.profile.gpus_of(len(gpus))]]
    return Cluster(2 * plan.ranks, plan.profile.timeouts.stop_s, stored_bytes(plan.shape), used)
