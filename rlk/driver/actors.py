"""The Ray actors: one rank each, and a way to leave that Ray records as asked for."""

from __future__ import annotations

import ray

from rlk.rollout.engine import EngineRank
from rlk.train.rank import TrainRank


class TrainActor(TrainRank):
    """A trainer rank."""

    def leave(self) -> None:
        """Ends this process; Ray records INTENDED_USER_EXIT."""
        self.stop()
        ray.actor.exit_actor()


class EngineActor(EngineRank):
    """One rank of one engine."""

    def leave(self) -> None:
        """Ends this process; Ray records INTENDED_USER_EXIT."""
        self.stop()
        ray.actor.exit_actor()
