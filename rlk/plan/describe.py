"""A plan in words, as `rlk plan` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlk.plan.config import OPTIONS
from rlk.plan.derive import Plan
from rlk.plan.errors import shown
from rlk.plan.placement import entrypoint, placement, record_path, submission_id

Section = tuple[str, list[tuple[str, str]]]


def describe(plan: Plan) -> list[Section]:
    """Titles, each with its lines of name and text, in the order to print."""
    return [
        ("topology", _topology(plan)),
        ("sampling", _sampling(plan)),
        ("batch", _batch(plan)),
        ("model", _model(plan)),
        ("options", _options(plan)),
        ("train environment", list(plan.train_env.items())),
        ("engine environment", list(plan.engine_env.items())),
        ("command", [("", command) for command in plan.commands]),
        ("submission", _submission(plan)),
        ("notes", [("", note) for note in plan.notes]),
        ("not in this version", [("", line) for line in plan.unbuilt]),
    ]


def _topology(plan: Plan) -> list[tuple[str, str]]:
    engine, graphs = plan.profile.engine, ", ".join(map(str, plan.graph_sizes))
    return [
        ("cell", plan.cell),
        ("profile", f"{plan.profile.origin} on {plan.profile.device}"),
        ("trainer", f"{plan.ranks} ranks = TP {plan.train.tp} x CP {plan.train.cp}"),
        ("rollout", f"{plan.engines} engines of {plan.engine_ranks} = TP {plan.rollout.tp} x CP {plan.rollout.cp}"),
        ("engine cap", plan.engine_cap or "none"),
        ("engine", f"{engine.max_num_seqs} requests, {engine.max_num_batched_tokens} tokens a step"),
        ("KV cache", f"{engine.kv_cache_bytes} bytes a rank in pages of {engine.block_size} tokens"),
        ("graph sizes", graphs or "none: no CUDA graphs on a CPU"),
        ("offload", "train state leaves the GPU during rollout" if plan.offload else "none: all stays resident"),
    ]


def _sampling(plan: Plan) -> list[tuple[str, str]]:
    lines = []
    for index, sampling in enumerate(plan.config.samplings):
        top_k = "off" if sampling.top_k == -1 else str(sampling.top_k)
        words = f"T {shown(sampling.temperature)}, top-p {shown(sampling.top_p)}, top-k {top_k}"
        every = f"sample {index} of each {len(plan.config.samplings)}" if plan.config.mix else "every sample"
        lines.append((every, "greedy" if sampling.greedy else words))
    return lines


def _batch(plan: Plan) -> list[tuple[str, str]]:
    samples = f"{plan.samples_per_step} = {plan.prompts_per_step} prompts x {plan.samples_per_prompt}"
    return [
        ("samples a step", samples),
        ("baseline", f"mean reward of the {plan.baseline}"),
        ("token budget", f"{plan.token_budget} a rank and micro-batch, {plan.logical_budget} over CP"),
        ("longest sample", f"{plan.max_model_len} tokens = prompt {plan.profile.max_prompt_len} + response"),
    ]


def _model(plan: Plan) -> list[tuple[str, str]]:
    shape = plan.shape
    return [
        ("checkpoint", plan.profile.model),
        ("layers", f"{shape.layers} of hidden size {shape.hidden}, {shape.heads} heads over {shape.kv_heads}"),
        ("vocabulary", f"{shape.vocab_size} real, {plan.padded_vocab} padded"),
    ]


def _submission(plan: Plan) -> list[tuple[str, str]]:
    """What `verify` or `run` would submit; the GPUs of the node are known only to its cluster."""
    if plan.config.ray_address is None:
        return []
    run_id = plan.config.run_id or "RUN_ID"
    placed = placement(plan, plan.profile.gpus or plan.ranks)
    each = "; ".join(f"{count} x {{{said}}}" for said, count in _counted(placed.bundles))
    record = record_path(Path(plan.config.output_root).absolute(), run_id)
    return [
        ("to", f"{plan.config.ray_address}, as job {submission_id(run_id)}"),
        ("entrypoint", entrypoint(plan.profile.python or "PYTHON", record)),
        ("bundles", f"{each} on one node, bundle i for train rank i and rollout worker i"),
        ("the node sees", "this Python, checkout, model, prompts and output root, at the same paths"),
    ]


def _counted(bundles: Sequence[Mapping[str, float]]) -> list[tuple[str, int]]:
    said = [", ".join(f"{name} {amount:g}" for name, amount in bundle.items()) for bundle in bundles]
    return list(Counter(said).items())


def _options(plan: Plan) -> list[tuple[str, str]]:
    effective = plan.effective()
    lines = []
    for name, asked in plan.requested().items():
        value = effective[name]
        text = "-" if value is None else OPTIONS[name].domain.text(value)
        source = "derived" if asked["value"] is None and value is not None else asked["source"]
        lines.append((OPTIONS[name].flag, f"{text}  ({source})"))
    return lines
