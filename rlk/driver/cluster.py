"""A private Ray for one session: its own address, ports, temporary folder and namespace; nobody else's is joined."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private import state as ray_state  # the public listing needs the dashboard, which a run does not start
from ray.core.generated import common_pb2, gcs_pb2

from rlk.driver import token
from rlk.driver.errors import RunError
from rlk.driver.gpus import VISIBLE
from rlk.driver.processes import Ledger
from rlk.evidence.ray_status import CLEAN_CAUSES, Actor
from rlk.kernels.proof_shared import FOLDER as PROOFS

log = logging.getLogger(__name__)

RAY_LEAVES_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
OBJECT_STORE_BYTES = 256 << 20
"""Of Ray's object store, beyond the weights that travel through it."""


class Cluster:
    """Ray, and the actors on it by role."""

    def __init__(self, actors: int, stop_s: float, weights_bytes: int = 0, gpus: Sequence[str] = ()) -> None:
        """weights_bytes: of one version of the model. gpus: indices of those that the ranks are spread over."""
        self.ledger = Ledger()
        self.handles: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # Ray's name of an actor, which never changes, by the role that it has now
        self._added = 0
        self._slots, self._stop_s = actors, stop_s
        # What the trainer exports, and the same cut for the engines, while an earlier version may not be gone yet.
        self._store_bytes = OBJECT_STORE_BYTES + 3 * weights_bytes
        self._gpus = tuple(gpus)
        self._folder: Path | None = None

    def start(self) -> None:
        """Starts Ray.

        Raises:
            RunError: this process is already connected to one.
        """
        if ray.is_initialized():
            raise RunError(
                "this process is connected to a Ray already; a run starts its own: call ray.shutdown() first"
            )
        token.use_own()
        quiet()
        # Ray puts sockets here, whose paths may have 107 characters: not below a deep run directory.
        self._folder = Path(tempfile.mkdtemp(prefix="rlk-"))
        ray.init(
            address="local",  # RAY_ADDRESS would otherwise join a cluster that is not ours
            num_cpus=self._slots,
            namespace="rlk",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=self._store_bytes,
            _temp_dir=str(self._folder),
            _system_config={
                # All ranks start at once, however few the cores: Ray would start two by two and warn about the rest.
                "worker_maximum_startup_concurrency": self._slots,
                # Idle workers started ahead lack the ranks' environment: they would only take the cores from the ranks.
                "prestart_worker_first_driver": False,
                "worker_niceness": 0,  # Ray would make ranks 15 nicer than this process: they are the run
            },
        )
        self.ledger.record_children()

    def add(self, role: str, cls: type, environment: Mapping[str, str], *args: Any, slot: int) -> Any:
        """Starts one actor: one rank, one process, with its environment set before its Python starts.

        slot: 0 to ranks - 1. A train rank and a rollout worker of the same slot share what the slot has, such as a GPU.
        """
        name, self._added = f"rank-{self._added}", self._added + 1
        handle = ray.remote(cls).options(name=name, max_restarts=0, **self._options(slot, environment)).remote(*args)
        self.handles[role], self._names[role] = handle, name
        return handle

    def _options(self, slot: int, environment: Mapping[str, str]) -> dict[str, Any]:
        """How Ray starts an actor of a slot."""
        return {"num_cpus": 1, "runtime_env": {"env_vars": {**environment, **self._gpu_of(slot)}}}

    def _gpu_of(self, slot: int) -> dict[str, str]:
        """Slots are spread over the GPUs, and a process sees its own GPU only."""
        if not self._gpus:
            return {}
        # Ray hides all GPUs from an actor that asks for none, unless it is told to leave the variable alone.
        gpu = self._gpus[slot * len(self._gpus) // (self._slots // 2)]
        return {VISIBLE: gpu, RAY_LEAVES_GPUS: "1", PROOFS: f"{self._folder}/proofs"}

    def assign(self, roles: Mapping[str, str]) -> None:
        """Gives actors other roles: new by old."""
        taken = {new: (self.handles.pop(old), self._names.pop(old)) for old, new in roles.items()}
        for role, (handle, name) in taken.items():
            self.handles[role], self._names[role] = handle, name

    def dismiss(self, roles: Collection[str]) -> None:
        """Asks these actors to leave and waits until Ray calls them dead; they are not the session's any more.

        Raises:
            RunError: one of them did not leave as it was asked to.
        """
        left = self._leave(roles)
        for role in roles:
            del self.handles[role], self._names[role]
        unclean = [actor.line() for actor in left if actor.cause not in CLEAN_CAUSES]
        if unclean:
            raise RunError(f"asked to leave, and did not leave well: {'; '.join(unclean)}")

    def actors(self) -> tuple[Actor, ...]:
        """Every actor's state, as Ray tells it; none while Ray is not up."""
        if not ray.is_initialized():
            return ()
        found, exits, job = [], _exit_types(), ray.get_runtime_context().get_job_id()
        roles = {name: role for role, name in self._names.items()}
        for entry in ray_state.actors().values():
            if entry["JobID"] == job and entry["Name"] in roles:
                found.append(Actor(roles[entry["Name"]], entry["State"], entry["Pid"], _cause(entry, exits)))
        return tuple(sorted(found, key=lambda actor: actor.name))

    def leave(self) -> tuple[Actor, ...]:
        """Asks every actor to leave, waits until Ray calls each of them dead, and returns how they ended."""
        return self._leave(self.handles)

    def _leave(self, roles: Collection[str]) -> tuple[Actor, ...]:
        for role in roles:
            self.handles[role].leave.remote()
        deadline = time.monotonic() + self._stop_s
        while any(actor.state != "DEAD" for actor in self._named(roles)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._named(roles)

    def _named(self, roles: Collection[str]) -> tuple[Actor, ...]:
        return tuple(actor for actor in self.actors() if actor.name in roles)

    def stop(self) -> None:
        """Ends Ray and every process recorded, by pid, and removes Ray's folder.

        Raises:
            RunError: a process outlived even a kill.
        """
        if ray.is_initialized():
            self._disconnect()
        self.ledger.end_all(self._stop_s)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        left = [owned for owned in self.ledger.owned if owned.process() is not None]
        if left:
            raise RunError(f"still alive after a kill: {', '.join(f'{o.role} (pid {o.pid})' for o in left)}")

    def _disconnect(self) -> None:
        self.ledger.record_children()
        ray.shutdown()


def quiet() -> None:
    """When one rank fails, what the others then say of it is in Ray's log and need not flood the terminal."""
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"


def _exit_types() -> dict[int, str]:
    """How Ray says each ended worker process ended, by pid."""
    accessor = ray_state.state._connect_and_get_accessor()
    workers = [gcs_pb2.WorkerTableData.FromString(raw) for raw in accessor.get_worker_table()]
    return {w.pid: common_pb2.WorkerExitType.Name(w.exit_type) for w in workers if w.HasField("exit_type")}


def _cause(entry: Mapping[str, Any], exits: Mapping[int, str]) -> str:
    """Ray's reason; for a worker that died its exit type, which alone tells a request to leave from a crash."""
    if entry["State"] != "DEAD":
        return "-"
    context = entry["DeathCause"].actor_died_error_context
    reasons = context.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number
    reason: str = reasons[context.reason].name
    return exits.get(entry["Pid"], reason) if reason == "WORKER_DIED" else reason
