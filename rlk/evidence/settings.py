"""What every process must report when its effective settings are read back: the readback fields, from the plan."""

from __future__ import annotations

from typing import Any

from rlk.plan.derive import Plan

DTYPE = "bfloat16"
MASTER_DTYPE = "float32"

# What vLLM gives a request that says nothing, with the checkpoint's generation_config.json kept out.
NEUTRAL_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

TRAIN_MODEL = "rlk.model.qwen3.Qwen3"

# Module and class of each vLLM hook. Native keeps our model class and attention backend, since the stock ones lack
# their compiled ops on a CPU, and takes vLLM's own sampler.
ENGINE_MODEL = "rlk.rollout.vllm_model.RolloutQwen3"
ENGINE_ATTENTION = "rlk.rollout.vllm_attention.PagedBackend"
ENGINE_SAMPLER = {
    "consistency": "rlk.rollout.vllm_sampler.CanonicalSampler",
    "native": "vllm.v1.sample.sampler.Sampler",
}


def requested_train(plan: Plan, rank: int) -> dict[str, Any]:
    """The fields of TrainReadback that the plan decides, for one rank; rank = tp_rank * cp + cp_rank."""
    return {
        "rank": rank,
        "tp_rank": rank // plan.train.cp,
        "cp_rank": rank % plan.train.cp,
        "tp": plan.train.tp,
        "cp": plan.train.cp,
        "mode": plan.config.mode,
        "dtype": DTYPE,
        "master_dtype": MASTER_DTYPE,
        "token_budget": plan.token_budget,
        "padded_vocab": plan.padded_vocab,
        "device": plan.profile.device,
        "transport": plan.transport if plan.ranks > 1 else "none",
        "offload": plan.offload,
        "model_class": TRAIN_MODEL,
    }


def requested_engine(plan: Plan, engine: int, rank: int) -> dict[str, Any]:
    """The fields of EngineReadback that the plan decides, for one rank of one engine."""
    limits = plan.profile.engine
    return {
        "engine": engine,
        "rank": rank,
        "tp": plan.rollout.tp,
        "cp": plan.rollout.cp,
        "decode_cp": 1,
        "world_size": plan.engine_ranks,
        "device": plan.profile.device,
        "transport": plan.transport if plan.engine_ranks > 1 else "none",
        "mode": plan.config.mode,
        "dtype": DTYPE,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "kv_cache_bytes": limits.kv_cache_bytes,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "graph_sizes": plan.graph_sizes,
        "kv_bytes_per_token": plan.shape.kv_bytes(plan.rollout.tp, plan.rollout.cp),
        "generation_config": "vllm",
        "default_sampling": NEUTRAL_SAMPLING,
        "model_class": ENGINE_MODEL,
        "attention_class": ENGINE_ATTENTION,
        "sampler_class": ENGINE_SAMPLER[plan.config.mode],
    }
