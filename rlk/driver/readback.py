"""From what an engine rank reads back of its live objects to the fields of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlk.evidence.schemas import EngineReadback, Partitioned
from rlk.evidence.settings import NEUTRAL_SAMPLING


def engine_record(raw: Mapping[str, Any]) -> EngineReadback:
    """The manifest's entry of one engine rank. Every value is one that the live engine showed; none is taken from
    the plan.

    `default_sampling` is what a request that says nothing would get: vLLM's neutral values under whatever the engine
    was given to put in their place.
    """
    worker, scheduler = raw["worker"], raw["scheduler"]
    (dtype,) = worker["weights_dtype"]
    (attention,) = worker["attention"]
    return EngineReadback(
        pid=raw["process"]["pid"],
        engine=raw["engine"],
        rank=worker["rank"],
        tp=worker["tensor_parallel"]["size"],
        cp=worker["prefill_context_parallel"]["size"],
        decode_cp=worker["decode_context_parallel"]["size"],
        world_size=worker["world_size"],
        device=worker["device"],
        gpu=worker["gpu"],
        transport=worker["transport"],
        mode="native" if worker["ops"] == "native" else "consistency",
        dtype=dtype.removeprefix("torch."),
        max_model_len=worker["max_model_len"],
        max_num_seqs=worker["max_num_seqs"],
        max_num_batched_tokens=worker["max_num_batched_tokens"],
        block_size=scheduler["block_size"],
        kv_cache_bytes=scheduler["kv_cache_bytes"],
        enable_prefix_caching=scheduler["prefix_caching"],
        enable_chunked_prefill=scheduler["chunked_prefill"],
        graph_sizes=tuple(scheduler["graph_sizes"]),
        kv_bytes_per_token=worker["kv_cache"]["bytes_per_token"],
        partitioned=Partitioned(**worker["partitioned"]),
        generation_config=scheduler["generation_config"],
        default_sampling={**NEUTRAL_SAMPLING, **scheduler["default_sampling"]},
        model_class=worker["model"],
        attention_class=attention,
        sampler_class=worker["sampler"],
        kernels=worker["kernels"],
    )
