"""Ray that is somebody else's: this process is one of its jobs, and what it reserves and starts there is its own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlk.driver.cluster import Cluster, quiet
from rlk.driver.errors import RunError
from rlk.driver.gpus import VISIBLE, Gpu, given_gpus, visible_gpus
from rlk.driver.provenance import ROOT
from rlk.kernels.proof_shared import FOLDER as PROOFS
from rlk.plan.derive import Plan
from rlk.plan.placement import Placement, placement


class JoinedCluster(Cluster):
    """The cluster of the job that this process is, with a placement group on this very node."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(2 * plan.ranks, plan.profile.timeouts.stop_s)
        self.plan = plan
        self._group: PlacementGroup | None = None
        self._placement: Placement | None = None

    def start(self) -> None:
        """Joins, and reserves room for all ranks; does nothing where that is done.

        Raises:
            RunError: this process is no job of a Ray, Ray does not take it, or the node had no room for all ranks
                within the start's limit.
        """
        if self._group is not None:
            return
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            raise RunError("no RAY_ADDRESS in the environment: `rlk job` is what Ray starts of a submission")
        quiet()
        self._folder = Path(tempfile.mkdtemp(prefix="rlk-"))
        # Names of actors are those of a namespace: another run on the same cluster has the same.
        options = {"namespace": f"rlk-{self.plan.run_id}", "log_to_driver": False, "configure_logging": False}
        try:
            ray.init(address=address, **options)
        except (RuntimeError, ConnectionError) as error:  # Ray's words for another Python or Ray than its own
            raise RunError(f"joining the Ray at {address}: {' '.join(str(error).split())[:400]}") from error
        node = ray.util.get_node_ip_address()
        gpus = sum(n["Resources"].get("GPU", 0) for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == node)
        self._placement = placement(self.plan, int(gpus))
        here = {f"node:{node}": 0.001}  # this node and no other: its ranks and this process share files and pids
        bundles = [{**bundle, **(here if slot == 0 else {})} for slot, bundle in enumerate(self._placement.bundles)]
        self._group = placement_group(bundles, strategy="STRICT_PACK")
        limit = self.plan.profile.timeouts.start_s
        if not self._group.wait(timeout_seconds=limit):
            total = ", ".join(f"{amount:g} {name}" for name, amount in self._placement.total.items())
            raise RunError(f"placement: node {node} had no {total} free within {limit} s: other jobs hold them")

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that Ray gave to the bundles, each once; none on a CPU.

        Raises:
            RunError: a bundle did not say within the start's limit.
        """
        assert self._placement is not None
        if not self._placement.gpus:
            return ()
        ask = ray.remote(given_gpus)
        slots = range(self._placement.ranks)
        asked = [
            ask.options(num_cpus=0, num_gpus=self._placement.actor_gpus, **self._bundle(s)).remote() for s in slots
        ]
        limit = self.plan.profile.timeouts.start_s
        try:
            found = ray.get(asked, timeout=limit)
        except GetTimeoutError as error:
            raise RunError(f"placement: no answer within {limit} s to which GPUs were given") from error
        return visible_gpus({VISIBLE: ",".join(dict.fromkeys(gpu for ids in found for gpu in ids))})

    def _options(self, slot: int, environment: Mapping[str, str]) -> dict[str, Any]:
        """See Cluster. The actor runs this interpreter on this checkout, whatever the cluster was started with."""
        assert self._placement is not None
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {**environment, "PYTHONPATH": path, PROOFS: f"{self._folder}/proofs"}
        return {
            "num_cpus": 1,
            "num_gpus": self._placement.actor_gpus,
            "runtime_env": {"env_vars": variables, "py_executable": sys.executable},
            **self._bundle(slot),
        }

    def _bundle(self, slot: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=slot)
        return {"scheduling_strategy": strategy}

    def _disconnect(self) -> None:
        """Ends what is this job's, and leaves the cluster as it was."""
        for actor in self.actors():
            if actor.state == "DEAD":
                continue
            if actor.pid:  # one that never answered is not recorded yet
                with suppress(psutil.NoSuchProcess):  # it ended meanwhile: nothing is left to own
                    self.ledger.name(actor.pid, actor.name)
            ray.kill(self.handles[actor.name])
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()
