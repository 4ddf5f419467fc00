"""Plan to vLLM: the arguments of an engine rank, the environment it must find, and the settings it must then show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlk.plan.derive import Plan

WORKERS = {"cpu": "rlk.rollout.vllm_cpu_worker.CpuRankWorker", "cuda": "rlk.rollout.vllm_worker.RankWorker"}
HOST = "127.0.0.1"  # all ranks of an engine are on one machine


def rank_environment(rank: int, world: int, port: int, device: str) -> dict[str, str]:
    """What vLLM's external_launcher reads to find its place among the ranks of one engine."""
    local = rank if device == "cpu" else 0  # to vLLM the number of a GPU, and each process sees its own one only
    place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": HOST, **{name: str(value) for name, value in place.items()}}


def environment_errors(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """One line for each variable of the plan that this process lacks; most are read when Python or vLLM starts."""
    return [
        f"{name}={environment.get(name)!r}: an engine rank must be started with {value!r}"
        for name, value in plan.engine_env.items()
        if environment.get(name) != value
    ]


def engine_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs, the same for every rank of an engine."""
    from rlk.rollout.vllm_model import PLAN_KEY
    from rlk.rollout.vllm_platform import ARCHITECTURE

    limits, timeout = plan.profile.engine, plan.profile.timeouts.collective_s
    return {
        "model": plan.profile.model,
        "hf_overrides": {"architectures": [ARCHITECTURE]},
        "worker_cls": WORKERS[plan.profile.device],
        "additional_config": {PLAN_KEY: plan.to_json()},
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # else unset fields are filled from the checkpoint's generation_config.json
        "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
        "tensor_parallel_size": plan.rollout.tp,
        "prefill_context_parallel_size": plan.rollout.cp,
        "distributed_executor_backend": "external_launcher",
        "distributed_timeout_seconds": timeout,
        "cpu_distributed_timeout_seconds": timeout,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "kv_cache_memory_bytes": limits.kv_cache_bytes,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "enforce_eager": not plan.graph_sizes,
        "async_scheduling": False,
        "seed": engine_seed(plan),
        "disable_log_stats": True,
        "disable_cascade_attn": True,
        **(_cuda_arguments(plan) if plan.profile.device == "cuda" else {}),
    }


def _cuda_arguments(plan: Plan) -> dict[str, Any]:
    sizes = list(plan.graph_sizes)
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes} if sizes else {}
    return {
        # vLLM looks at the share of memory that is free even where the cache's size is given: ranks share a GPU.
        "gpu_memory_utilization": 0.01,
        "disable_custom_all_reduce": True,
        "compilation_config": {"mode": 0, "custom_ops": ["none"], **graphs},
    }


def engine_seed(plan: Plan) -> int:
    """What vLLM seeds torch and numpy with, within numpy's limit; only native mode's stock sampler draws from it."""
    return plan.config.seed % 2**32


def same_engine(a: Plan, b: Plan) -> bool:
    """Whether an engine built for one plan can serve the other: everything but the seed and the sampler's settings."""
    moving = {"additional_config": None, "seed": None}
    built = [({**engine_arguments(p), **moving}, p.config.mode, p.shape, p.rollout) for p in (a, b)]
    return built[0] == built[1]


def expected_settings(plan: Plan) -> dict[str, Any]:
    """Dotted names of the read-back and the values that this plan asks for."""
    limits, native = plan.profile.engine, plan.config.mode == "native"
    return {
        "worker.world_size": plan.engine_ranks,
        "worker.tensor_parallel.size": plan.rollout.tp,
        "worker.prefill_context_parallel.size": plan.rollout.cp,
        "worker.decode_context_parallel.size": 1,
        "worker.model": "rlk.rollout.vllm_model.RolloutQwen3",
        "worker.sampler": "vllm.v1.sample.sampler.Sampler" if native else "rlk.rollout.vllm_sampler.CanonicalSampler",
        "worker.ops": "native" if native else "canonical",
        "worker.device": plan.profile.device,
        "worker.transport": plan.transport if plan.engine_ranks > 1 else "none",
        "worker.attention": ["rlk.rollout.vllm_attention.PagedBackend"],
        "worker.attention_core": ["native_core" if native else "canonical_core"],
        "worker.attention_layers": plan.shape.layers,
        "worker.weights_dtype": ["torch.bfloat16"],
        "worker.kv_cache.dtype": "torch.bfloat16",
        "worker.kv_cache.bytes_per_token": plan.shape.kv_bytes(plan.rollout.tp, plan.rollout.cp),
        "worker.logprobs_mode": "processed_logprobs",
        "worker.max_num_seqs": limits.max_num_seqs,
        "worker.max_num_batched_tokens": limits.max_num_batched_tokens,
        "worker.max_model_len": plan.max_model_len,
        "worker.graphs": bool(plan.graph_sizes),
        "worker.async_scheduling": False,
        "scheduler.kv_cache_bytes": limits.kv_cache_bytes,
        "scheduler.graph_sizes": list(plan.graph_sizes),
        "scheduler.prefix_caching": True,
        "scheduler.chunked_prefill": True,
        "scheduler.block_size": limits.block_size,
        "scheduler.max_running": limits.max_num_seqs,
        "scheduler.max_scheduled_tokens": limits.max_num_batched_tokens,
        "scheduler.enforce_eager": not plan.graph_sizes,
        "scheduler.default_sampling": {},
        "scheduler.model": plan.profile.model,
    }


def setting_errors(plan: Plan, readback: Mapping[str, Any]) -> list[str]:
    """One line for each setting that the live engine shows otherwise than the plan asks for."""
    lines = []
    for name, asked in expected_settings(plan).items():
        shown: Any = readback
        for part in name.split("."):
            shown = shown[part]
        if shown != asked:
            lines.append(f"{name}: the plan asks for {asked!r}, the live engine shows {shown!r}")
    return lines + _page_errors(plan, readback["scheduler"]["blocks"])


def _page_errors(plan: Plan, pages: int) -> list[str]:
    """vLLM 0.26.0 never gives out page 0: with the pages of just one sequence it would reschedule that one forever."""
    needed = 1 + -(-plan.max_model_len // plan.profile.engine.block_size)
    if pages >= needed:
        return []
    return [
        f"scheduler.blocks: {pages} KV pages: {plan.max_model_len} tokens need {needed}: raise engine.kv_cache_bytes"
    ]
