"""What a live engine rank says about its settings: each value is read from the object that uses it."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from rlk.kernels.collectives.connect import transport_of
from rlk.kernels.devices import gpu_name

PACKAGES = ("vllm", "torch", "ray", "numpy", "transformers")
ENVIRONMENT = ("RLK_", "VLLM_", "OMP_", "TORCHDYNAMO_", "CUBLAS", "NCCL_")
"""Prefixes of the variables that can move a bit or a schedule."""


def qualified(thing: object) -> str:
    """Module and name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def process_settings() -> dict[str, Any]:
    """The process: pid, threads, versions, environment."""
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)},
    }


def bytes_per_token(runner: Any) -> int:
    """Bytes that one token of one page takes on this rank, over all layers, from the live cache tensors.

    The first axis of a cache counts pages; how many tokens a page stands for is the scheduler's to say.
    """
    tokens: int = runner.kv_caches[0].shape[0] * runner.cache_config.block_size
    held: int = sum(cache.numel() * cache.element_size() for cache in runner.kv_caches)
    whole, rest = divmod(held, tokens)
    if rest:
        raise ValueError(f"KV caches of {len(runner.kv_caches)} layers: no whole number of bytes for {tokens} tokens")
    return whole


def worker_settings(worker: Any) -> dict[str, Any]:
    """Classes, parallel groups, KV cache and model of a worker."""
    from vllm.distributed import get_dcp_group, get_pcp_group, get_tp_group, get_world_group

    runner = worker.model_runner
    served = runner.get_model()  # without the wrapper that replays graphs
    model, layers = served.qwen3, list(served.attention)
    caches = {(str(c.dtype), tuple(c.shape)) for c in runner.kv_caches}
    (dtype, shape), *others = caches
    if others:
        raise ValueError(f"KV caches of unlike layers: {sorted(caches)}: one shape is expected")
    return {
        "rank": get_world_group().rank_in_group,
        "world_size": get_world_group().world_size,
        "tensor_parallel": {"size": get_tp_group().world_size, "rank": get_tp_group().rank_in_group},
        "prefill_context_parallel": {"size": get_pcp_group().world_size, "rank": get_pcp_group().rank_in_group},
        "decode_context_parallel": {"size": get_dcp_group().world_size},
        "device": runner.device.type,
        "gpu": gpu_name(runner.device),
        "transport": transport_of(model.context.tp, model.context.cp),
        "worker": qualified(worker),
        "runner": qualified(runner),
        "model": qualified(served),
        "ops": model.ops.name,
        "kernels": {proof.name: proof.form for proof in worker.proofs},
        "sampler": qualified(runner.sampler),
        "logprobs_mode": runner.model_config.logprobs_mode,
        "attention": sorted({f"{layer.attn_backend.__module__}.{layer.attn_backend.__qualname__}" for layer in layers}),
        "attention_core": sorted({layer.impl.core.__name__ for layer in layers}),
        "attention_layers": len(layers),
        "weights_dtype": sorted({str(w.dtype) for w in model.weights.values()}),
        "logits_columns": model.shape.vocab_size,
        "kv_cache": {"dtype": dtype, "shape": list(shape), "bytes_per_token": bytes_per_token(runner)},
        "partitioned": asdict(runner.model.context_parallel.counts),
        "max_num_seqs": runner.max_num_reqs,
        "max_num_batched_tokens": runner.max_num_tokens,
        "max_model_len": runner.max_model_len,
        "graphs": bool(getattr(runner, "cudagraph_batch_sizes", ())),
        "async_scheduling": bool(runner.use_async_scheduling),
    }


def scheduler_settings(engine: Any) -> dict[str, Any]:
    """Scheduler, executor and the defaults a request would get from a vLLM engine."""
    core = engine.engine_core.engine_core
    scheduler, config = core.scheduler, engine.vllm_config
    return {
        "executor": qualified(core.model_executor),
        "scheduler": qualified(scheduler),
        "policy": scheduler.policy.value,
        "prefix_caching": bool(scheduler.kv_cache_manager.enable_caching),
        "chunked_prefill": bool(scheduler.scheduler_config.enable_chunked_prefill),
        "block_size": scheduler.block_size,
        "kv_cache_bytes": config.cache_config.kv_cache_memory_bytes,
        "graph_sizes": list(config.compilation_config.cudagraph_capture_sizes or ()),
        "blocks": scheduler.kv_cache_config.num_blocks,
        "max_running": scheduler.max_num_running_reqs,
        "max_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "enforce_eager": bool(config.model_config.enforce_eager),
        "generation_config": config.model_config.generation_config,
        "default_sampling": config.model_config.get_diff_sampling_param(),
        "model": config.model_config.model,
        "seed": config.model_config.seed,
    }
