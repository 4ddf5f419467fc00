"""What the ranks of a CUDA plan say of themselves, by the code that says it there, without a GPU.

Models lie on a pretended GPU. A transport is the real class without its arena, and vLLM's objects are bare ones with
the attributes that are read; everything goes through the serializer of Ray's returned values.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from ray import cloudpickle
from ray._raylet import MessagePackSerializer

from rlk.evidence import layout
from rlk.kernels.collectives.arena import Layout
from rlk.kernels.collectives.base import Alone
from rlk.kernels.proof import Proof
from rlk.model.ops import CanonicalOps
from rlk.model.parallel import ParallelContext
from rlk.model.qwen3 import Qwen3
from rlk.plan.derive import Plan
from rlk.rollout.context_parallel import Partitioned
from rlk.rollout.engine import EngineRank
from rlk.rollout.readback import worker_settings
from rlk.train import rank as train_rank
from rlk.train.rank import TrainRank
from rlk.train.worker import TrainWorker
from tests.unit.pretend_gpu import pretended_gpu
from tests.unit.vllm_modules import with_vllm

PROOFS = tuple(Proof(name, "cuda: Triton", "equal to the plain chain") for name in ("gemm", "attention", "policy"))
H200 = SimpleNamespace(name="NVIDIA H200", uuid="3b1fd8d2-0000-0000-0000-000000000000")
ARENA, PAGES, FIRST_PID = 64 << 20, 40, 100


def returned(value: Any) -> Any:
    """As the caller of an actor gets it: plain types by msgpack, all others by pickle."""
    others: list[Any] = []

    def keep(thing: Any) -> int:
        others.append(cloudpickle.dumps(thing, protocol=5))
        return len(others) - 1

    packed = MessagePackSerializer.dumps(value, keep)
    return MessagePackSerializer.loads(packed, lambda index: cloudpickle.loads(others[index]))


@cache
def transport() -> Any:
    """The class of the transport, imported with nothing in the place of CUDA's bindings where there are none."""
    if find_spec("cuda") is not None:
        return import_module("rlk.kernels.collectives.ipc").IpcCollective
    import_module("rlk.kernels.cuda.launch")  # Triton first: it cannot be imported twice
    with patch.dict(sys.modules, {"cuda": MagicMock(), "cuda.bindings": MagicMock()}):
        return import_module("rlk.kernels.collectives.ipc").IpcCollective


@contextmanager
def on_gpu() -> Iterator[None]:
    """A device "cuda" with a name and memory that an offload frees."""
    memory = itertools.count(1 << 30, -(1 << 20))
    with ExitStack() as held:
        held.enter_context(pretended_gpu())
        held.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device: H200))
        held.enter_context(patch.object(torch.cuda, "memory_allocated", lambda device: next(memory)))
        yield


def context(tp: int, cp: int, rank: int) -> ParallelContext:
    """The place of rank tp_rank * cp + cp_rank."""

    def group(size: int, at: int) -> Any:
        if size == 1:
            return Alone()
        made = object.__new__(transport())
        made.size, made.rank, made.layout, made.device_of_rank = size, at, Layout(size, ARENA), [0] * size
        return made

    return ParallelContext(group(tp, rank // cp), group(cp, rank % cp))


def train(plan: Plan) -> list[dict[str, Any]]:
    """Every train rank after its last step."""
    return [_train(plan, rank) for rank in range(plan.ranks)]


def _train(plan: Plan, rank: int) -> dict[str, Any]:
    pid = FIRST_PID + rank
    with (
        on_gpu(),
        patch.object(train_rank.dist, "get_rank", lambda: rank),
        patch.object(train_rank.os, "getpid", lambda: pid),
    ):
        actor = TrainRank(plan.to_json(), rank)
        actor.proofs = PROOFS
        actor.worker = TrainWorker(plan, context(plan.train.tp, plan.train.cp, rank))
        if plan.offload:
            actor.offload()
            actor.restore()
        return returned(actor.read_back())


def engines(plan: Plan) -> list[list[dict[str, Any]]]:
    """Every rank of every engine; engine rank = cp_rank * tp + tp_rank."""
    first = FIRST_PID + plan.ranks
    return [
        [_engine(plan, engine, rank, first + engine * plan.engine_ranks + rank) for rank in range(plan.engine_ranks)]
        for engine in range(plan.engines)
    ]


def _engine(plan: Plan, engine: int, rank: int, pid: int) -> dict[str, Any]:
    tp, cp = plan.rollout.tp, plan.rollout.cp
    sizes = {
        "get_world_group": SimpleNamespace(world_size=tp * cp, rank_in_group=rank),
        "get_tp_group": SimpleNamespace(world_size=tp, rank_in_group=rank % tp),
        "get_pcp_group": SimpleNamespace(world_size=cp, rank_in_group=rank // tp),
        "get_dcp_group": SimpleNamespace(world_size=1, rank_in_group=0),
    }
    with_vllm("sampling")
    distributed = import_module("vllm.distributed")
    place = rank % tp * cp + rank // tp
    with ExitStack() as held:
        held.enter_context(on_gpu())
        for name, group in sizes.items():
            held.enter_context(patch.object(distributed, name, lambda group=group: group))
        held.enter_context(patch("rlk.rollout.readback.os.getpid", lambda: pid))
        live = _vllm(plan, _worker(plan, context(tp, cp, place)))
        actor = object.__new__(EngineRank)
        actor.engine, actor.rank, actor._live = engine, rank, live
        actor._applied, actor._seconds = set(), {"build": 1.5}
        return returned(actor.read_back())


def _worker(plan: Plan, own: ParallelContext) -> Any:
    backend = with_vllm("vllm_attention").PagedBackend
    served = object.__new__(with_vllm("vllm_model").RolloutQwen3)
    torch.nn.Module.__init__(served)
    served.qwen3 = Qwen3(plan.shape, own, CanonicalOps(), plan.max_model_len, device=torch.device("cuda"))
    core = SimpleNamespace(__name__="canonical_core")
    served.attention = [SimpleNamespace(attn_backend=backend, impl=SimpleNamespace(core=core))] * plan.shape.layers
    served.context_parallel = SimpleNamespace(counts=Partitioned())
    limits, block = plan.profile.engine, plan.profile.engine.block_size
    heads, width = plan.shape.kv_heads // plan.rollout.tp, plan.shape.head_dim // plan.rollout.cp
    cache = backend.get_kv_cache_shape(PAGES, block, heads, width)
    runner = SimpleNamespace(
        device=torch.device("cuda", 0),
        get_model=lambda: served,
        model=served,
        sampler=object.__new__(with_vllm("vllm_sampler").CanonicalSampler),
        kv_caches=[torch.zeros(cache, dtype=torch.bfloat16, device="cuda") for _ in range(plan.shape.layers)],
        cache_config=SimpleNamespace(block_size=block),
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        max_num_reqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        cudagraph_batch_sizes=list(plan.graph_sizes),
        use_async_scheduling=False,
    )
    return SimpleNamespace(model_runner=runner, proofs=PROOFS)


def _vllm(plan: Plan, worker: Any) -> Any:
    limits = plan.profile.engine
    scheduler = SimpleNamespace(
        policy=SimpleNamespace(value="fcfs"),
        kv_cache_manager=SimpleNamespace(enable_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        block_size=limits.block_size,
        kv_cache_config=SimpleNamespace(num_blocks=PAGES),
        max_num_running_reqs=limits.max_num_seqs,
        max_num_scheduled_tokens=limits.max_num_batched_tokens,
    )
    model = SimpleNamespace(
        enforce_eager=not plan.graph_sizes,
        generation_config="vllm",
        get_diff_sampling_param=dict,
        model=plan.profile.model,
        seed=plan.config.seed,
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=limits.kv_cache_bytes),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=list(plan.graph_sizes)),
        model_config=model,
    )
    core = SimpleNamespace(scheduler=scheduler, model_executor=SimpleNamespace())
    return SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core),
        vllm_config=config,
        collective_rpc=lambda method, args: [worker_settings(worker)] if method == "settings" else None,
    )


def pids(plan: Plan) -> dict[str, int]:
    """The process of each role."""
    return {r: FIRST_PID + i for i, r in enumerate(layout.roles(plan.ranks, plan.engines, plan.engine_ranks))}
