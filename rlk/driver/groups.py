"""The trainer and the engines as groups of ranks that are called together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from rlk.driver.actors import EngineActor, TrainActor
from rlk.driver.cluster import Cluster
from rlk.driver.faults import SyncFault
from rlk.driver.ports import ReservedPorts
from rlk.driver.sync import Bits
from rlk.driver.waiting import collect
from rlk.evidence import layout
from rlk.plan.derive import Plan
from rlk.rollout.messages import Generation, Request
from rlk.train.batching import Sample
from rlk.train.optimizer import UpdateReport
from rlk.train.worker import ScoredTokens

Place = tuple[int, int]  # engine, rank within it
Recorded = tuple[int, int, dict[str, npt.NDArray[Any]]]  # first shard, first piece, arrays of rlk.evidence.probe


class Trainer:
    """All train ranks, in rank order: rank = tp_rank * CP + cp_rank."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.plan = plan
        self.ranks = {
            layout.train_role(r): cluster.add(
                layout.train_role(r), TrainActor, plan.train_env, plan.to_json(), r, slot=r
            )
            for r in range(plan.ranks)
        }

    def _call(self, stage: str, timeout_s: float, method: str, *args: Any) -> list[Any]:
        refs = {role: getattr(handle, method).remote(*args) for role, handle in self.ranks.items()}
        return list(collect(refs, timeout_s, f"trainer {stage}").values())

    def starting(self) -> dict[str, Any]:
        """Begins the start of every rank and returns what to wait for."""
        first = layout.train_role(0)
        opening = {first: self.ranks[first].open_store.remote()}
        port = collect(opening, self.plan.profile.timeouts.start_s, "trainer start")
        return {role: handle.start.remote(port[first]) for role, handle in self.ranks.items()}

    def moving(self, plan: Plan) -> dict[str, Any]:
        """Begins the move to the topology and the initial state of `plan`, and returns what to wait for."""
        self.plan = plan
        return {role: handle.move.remote(plan.to_json()) for role, handle in self.ranks.items()}

    def score(self, samples: Sequence[Sample]) -> list[tuple[ScoredTokens, npt.NDArray[np.float32]]]:
        """Policy and reference log-probabilities, by rank."""
        return self._call("score", self.plan.profile.timeouts.train_s, "score", samples)

    def update(
        self, coefficients: Mapping[int, npt.NDArray[np.float32]]
    ) -> list[tuple[npt.NDArray[np.float32], UpdateReport]]:
        """One optimizer step; differentiated log-probabilities and report, by rank."""
        return self._call("update", self.plan.profile.timeouts.train_s, "update", coefficients)

    def offload(self) -> None:
        """Every rank leaves its GPU to the engines."""
        self._call("offload", self.plan.profile.timeouts.sync_s, "offload")

    def restore(self) -> None:
        """Every rank takes its GPU back."""
        self._call("restore", self.plan.profile.timeouts.sync_s, "restore")

    def export(self) -> list[dict[str, Bits]]:
        """Words of the stored shards, by tensor-parallel rank."""
        return self._holders("export")

    def described(self) -> list[list[tuple[str, int, str]]]:
        """Name, elements and dtype of every exported part, by tensor-parallel rank."""
        return self._holders("described")

    def _holders(self, method: str) -> list[Any]:
        """Asks one rank of each tensor-parallel place: those of a context-parallel group hold the same weights."""
        roles = [layout.train_role(rank) for rank in range(0, self.plan.ranks, self.plan.train.cp)]
        refs = {role: getattr(self.ranks[role], method).remote() for role in roles}
        return list(collect(refs, self.plan.profile.timeouts.sync_s, f"trainer {method}").values())

    def update_fingerprints(self) -> list[dict[str, dict[str, tuple[int, int]]]]:
        """Each rank's part of the fingerprints of the last update."""
        return self._call("update fingerprints", self.plan.profile.timeouts.sync_s, "update_fingerprints")

    def take_probe(self) -> dict[str, Recorded]:
        """What each rank recorded since the last call, by role."""
        taken = self._call("probe", self.plan.profile.timeouts.sync_s, "take_probe")
        return dict(zip(self.ranks, taken, strict=True))

    def fingerprints(self) -> list[dict[str, tuple[int, int]]]:
        """Each rank's part of every exported tensor's fingerprint."""
        return self._call("fingerprints", self.plan.profile.timeouts.sync_s, "fingerprints")

    def read_back(self) -> list[dict[str, Any]]:
        """Effective settings, by rank."""
        return self._call("read-back", self.plan.profile.timeouts.sync_s, "read_back")

    def proofs(self) -> list[tuple[str, str, str]]:
        """Name, form and proof of every kernel choice, which are the same on every rank."""
        first = layout.train_role(0)
        ref = {first: self.ranks[first].proof_sentences.remote()}
        return list(collect(ref, self.plan.profile.timeouts.sync_s, "trainer proofs")[first])


class Engines:
    """All ranks of all engines; roles in engine, then rank order."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.plan, self.cluster = plan, cluster
        self.ranks: dict[Place, Any] = {}
        self._ports = ReservedPorts(plan.engines)
        for slot, (place, args) in enumerate(_places(plan, self._ports.numbers).items()):
            role = layout.engine_role(*place)
            self.ranks[place] = cluster.add(role, EngineActor, plan.engine_env, *args, slot=slot)

    def _by_engine(
        self, stage: str, timeout_s: float, method: str, args: Mapping[Place, tuple[Any, ...]]
    ) -> list[list[Any]]:
        refs = {
            layout.engine_role(*place): getattr(handle, method).remote(*args.get(place, ()))
            for place, handle in self.ranks.items()
        }
        results = list(collect(refs, timeout_s, f"engines {stage}").values())
        return [results[i : i + self.plan.engine_ranks] for i in range(0, len(results), self.plan.engine_ranks)]

    def starting(self) -> dict[str, Any]:
        """Begins the start of every rank and returns what to wait for."""
        return {layout.engine_role(*place): handle.start.remote() for place, handle in self.ranks.items()}

    def moving(self, plan: Plan) -> dict[str, Any]:
        """Begins the move to the engines of `plan`, in initial state, and returns what to wait for: processes take new
        places, those that are not needed any more leave, and missing ones are started."""
        self._ports = ReservedPorts(plan.engines)
        places, old = _places(plan, self._ports.numbers), [layout.engine_role(*place) for place in self.ranks]
        self.cluster.dismiss(old[len(places) :])
        new = [layout.engine_role(*place) for place in places]
        self.cluster.assign(dict(zip(old, new, strict=False)))
        self.plan, waiting = plan, {}
        for slot, (role, args) in enumerate(zip(new, places.values(), strict=True)):
            if role in self.cluster.handles:
                waiting[role] = self.cluster.handles[role].move.remote(*args)
            else:
                waiting[role] = self.cluster.add(role, EngineActor, plan.engine_env, *args, slot=slot).start.remote()
        self.ranks = {place: self.cluster.handles[layout.engine_role(*place)] for place in places}
        return waiting

    def met(self) -> None:
        """Every rank has started: their meetings are held."""
        self._ports.release()

    def generate(self, step: int, requests: Sequence[Sequence[Request]], version: int) -> list[list[Generation]]:
        """What every rank of every engine generated from its engine's requests."""
        args = {(e, r): (step, requests[e], version) for e, r in self.ranks}
        return self._by_engine("rollout", self.plan.profile.timeouts.rollout_s, "generate", args)

    def load(self, shards: Sequence[Mapping[str, Bits]], version: int, fault: SyncFault | None = None) -> None:
        """Overwrites weights and names them; shards by tensor-parallel rank, the same for every engine unless a fault
        was asked for. Drops the cache."""
        given = [fault.shards(e, shards) if fault else shards for e in range(self.plan.engines)]
        # Each part once in the memory that all processes share, however many engines take it.
        parts = {id(part): part for parts in given for part in parts}
        put = {name: ray.put(part) for name, part in parts.items()}
        args = {(e, r): (put[id(given[e][r % self.plan.rollout.tp])],) for e, r in self.ranks}
        self._by_engine("weight load", self.plan.profile.timeouts.sync_s, "load", args)
        self._by_engine("commit", self.plan.profile.timeouts.sync_s, "commit", dict.fromkeys(self.ranks, (version,)))

    def fingerprints(self) -> list[list[dict[str, tuple[int, int]]]]:
        """Each rank's part of every tensor's fingerprint, from its live weights."""
        return self._by_engine("fingerprints", self.plan.profile.timeouts.sync_s, "fingerprint", {})

    def take_probe(self) -> dict[str, Recorded]:
        """What each rank recorded since the last call, by role."""
        taken = self._by_engine("probe", self.plan.profile.timeouts.sync_s, "take_probe", {})
        return {layout.engine_role(e, r): one for e, ranks in enumerate(taken) for r, one in enumerate(ranks)}

    def counters(self) -> list[dict[str, int]]:
        """Events counted inside each engine, on its rank 0."""
        return [ranks[0] for ranks in self._by_engine("counters", self.plan.profile.timeouts.sync_s, "counters", {})]

    def read_back(self) -> list[list[dict[str, Any]]]:
        """Effective settings, by engine and rank."""
        return self._by_engine("read-back", self.plan.profile.timeouts.sync_s, "read_back", {})


def _places(plan: Plan, ports: Sequence[int]) -> dict[Place, tuple[str, int, int, int, int]]:
    """Every rank of every engine, and what its process is told."""
    return {
        (engine, rank): (plan.to_json(), engine, rank, plan.engine_ranks, port)
        for engine, port in enumerate(ports)
        for rank in range(plan.engine_ranks)
    }
