"""What is refused before anything is created: each refusal is one line with the value, what is allowed and the remedy.

No process on a GPU is touched, and none can be kept from coming later: the list is of this moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil

from rlk.driver.gpus import VISIBLE, ComputeProcess, Gpu, visible_gpus
from rlk.driver.provenance import repository
from rlk.evidence.schemas import Repository
from rlk.plan.config import OPTIONS
from rlk.plan.derive import Plan
from rlk.plan.errors import ConfigErrors, shown

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Memory of these comes from CUDA's virtual memory management or from pools of CUDA's own, which CUDA IPC cannot export.
# Arenas are taken from the driver and not from torch; whatever of torch's own is exported would fail at a peer.
# NCCL_CUMEM_ENABLE is no such setting: what it places there are buffers of NCCL's own, which nobody exports. vLLM's
# sleep mode would be one; it is an argument of the engine, and no engine here is started with it.
_NOT_EXPORTABLE = {"expandable_segments": ("true", "1"), "backend": ("cudamallocasync",)}


def refuse(plan: Plan, env: Mapping[str, str], *, gpus: bool = True) -> None:
    """Raises ConfigErrors with every reason not to run this plan now, those of this host's GPUs included."""
    lines = [*settings_refusals(plan, env, repository)]
    if plan.profile.device == "cuda" and gpus:
        lines += gpu_refusals(plan, visible_gpus(env))
    if lines:
        raise ConfigErrors(lines)


def settings_refusals(plan: Plan, env: Mapping[str, str], checkout: Callable[[], Repository]) -> Iterator[str]:
    """Reasons in the environment and in the checkout."""
    flag = OPTIONS["ray_address"].flag
    if env.get("RAY_ADDRESS") and plan.config.ray_address is None:
        yield (
            f"RAY_ADDRESS={shown(env['RAY_ADDRESS'])}: a cluster is joined only where {flag} names it: unset the "
            f"variable and a run starts a Ray of its own, or give {flag} the address of that cluster's dashboard"
        )
    if plan.profile.device == "cuda":
        yield from allocator_refusals(env)
    if not plan.profile.test and not plan.config.allow_dirty:
        state = checkout()
        if state.dirty:
            yield (
                f"checkout {state.revision} has uncommitted changes, SHA-256 {state.patch_sha256}: allowed is a "
                f"clean one: commit them, or {OPTIONS['allow_dirty'].flag} records them by this hash"
            )


def allocator_refusals(env: Mapping[str, str]) -> Iterator[str]:
    """Settings of torch's allocator under which memory cannot be shared between processes."""
    for variable in ALLOCATORS:
        for part in env.get(variable, "").split(","):
            key, _, value = (word.strip() for word in part.partition(":"))
            if value.lower() in _NOT_EXPORTABLE.get(key, ()):
                yield (
                    f"{variable}={shown(env[variable])}: {key}:{value} makes memory that CUDA IPC cannot export: "
                    f"allowed is the default allocator: take {key} out of it"
                )


def gpu_refusals(plan: Plan, gpus: Sequence[Gpu], own: Callable[[], set[int]] | None = None) -> Iterator[str]:
    """Too few GPUs, GPUs that are no Hopper, and processes of others on those that would be used.

    `own` gives the pids that are not foreign; this process and what it started, unless said otherwise.
    """
    needed = plan.profile.gpus_of(len(gpus))
    if len(gpus) < needed:
        yield (
            f"profile {plan.profile.origin}: gpus {needed}: {len(gpus)} are visible ({VISIBLE}, else all of the "
            "machine): run it where there are enough, or use a profile with fewer"
        )
    used = gpus[:needed]
    for gpu in used:
        if not gpu.hopper:
            major, minor = gpu.capability
            yield (
                f"GPU {gpu.index} ({gpu.name}) has compute capability {major}.{minor}: allowed is 9.0 (Hopper), for "
                f"which the kernels are proved: leave it out of {VISIBLE}"
            )
    mine = (own or _own_processes)()
    for gpu in used:
        for process in gpu.processes:
            if process.pid not in mine:
                yield (
                    f"GPU {gpu.index} ({gpu.name}) is in use: {_described(process)}: allowed are GPUs without compute "
                    f"processes: wait for it to end, or leave the GPU out of {VISIBLE}"
                )


def _described(process: ComputeProcess) -> str:
    memory = "unknown memory" if process.memory is None else f"{process.memory >> 20} MiB"
    return f"pid {process.pid}, {process.name}, {memory}"


def _own_processes() -> set[int]:
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
