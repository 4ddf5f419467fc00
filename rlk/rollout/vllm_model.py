"""The model as vLLM loads it: a thin module around rlk.model.qwen3, with one of vLLM's attention layers a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_pcp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype

from rlk.kernels.collectives.base import Alone, Collective
from rlk.kernels.collectives.connect import connect
from rlk.model import checkpoint
from rlk.model.native import NativeOps
from rlk.model.ops import CanonicalOps, Ops
from rlk.model.parallel import ParallelContext
from rlk.model.probe import ProbedOps, Recorder
from rlk.model.qwen3 import Qwen3
from rlk.plan.derive import Plan
from rlk.rollout.context_parallel import ContextParallel
from rlk.rollout.faults import PageFault
from rlk.rollout.paging import PagedBatch
from rlk.rollout.vllm_attention import PagedBackend, ShardedAttention, canonical_core, native_core

PLAN_KEY = "rlk_plan"
"""Where vLLM's additional_config carries the plan: the one channel by which it reaches worker and model."""


def plan_of(vllm_config: Any) -> Plan:
    """The plan that an engine was started with."""
    return Plan.from_json(vllm_config.additional_config[PLAN_KEY])


def rollout_context(plan: Plan) -> ParallelContext:
    """This rank's place in the engine, over vLLM's own groups: engine rank = cp_rank * TP + tp_rank."""
    timeout_s = plan.profile.timeouts.collective_s
    return ParallelContext(
        _join(plan.transport, get_tp_group(), "tensor parallel group of an engine", timeout_s),
        _join(plan.transport, get_pcp_group(), "context parallel group of an engine", timeout_s),
    )


def _join(transport: str, group: Any, name: str, timeout_s: float) -> Collective:
    if group.world_size == 1:
        return Alone()
    return connect(transport, group.cpu_group, name, timeout_s)


def step_batch() -> PagedBatch | None:
    """The step that vLLM runs now; None in the memory profiling run at start-up."""
    metadata: Mapping[str, PagedBatch] | None = get_forward_context().attn_metadata
    return next(iter(metadata.values())) if metadata else None


def step_rows(batch: PagedBatch, requests: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample id of every token row of a step, int64 [T], and the last row of every request, int64 [R]."""
    first = batch.query_first.to(torch.int64)[: len(requests) + 1]
    ids = torch.tensor([int(request.partition("-")[0]) for request in requests], device=first.device)
    return ids.repeat_interleave(first.diff()), first[1:] - 1


class RolloutQwen3(nn.Module):
    """What vLLM's runner calls. It holds no torch parameters: weights live in `qwen3` and change by `load_stored`."""

    request_ids: Callable[[], Sequence[str]]
    """Requests of the step in the order of their rows; the worker provides it: vLLM tells a model only positions."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        plan = plan_of(vllm_config)
        shape, tp = plan.shape, plan.rollout.tp
        native = plan.config.mode == "native"
        ops: Ops = NativeOps() if native else CanonicalOps()
        self.path, self.ops = Path(vllm_config.model_config.model), ops
        self.forwards = 0  # of this code; a graph that is replayed runs none
        self.page = plan.profile.engine.block_size
        self.recorder: Recorder | None = None
        self.page_fault: PageFault | None = None
        # vLLM makes bf16 torch's default dtype around this; tables and sums that name no dtype must not follow it.
        device = torch.device(plan.profile.device)
        with set_default_torch_dtype(torch.float32):
            self.qwen3 = Qwen3(shape, rollout_context(plan), ops, plan.max_model_len, device=device)
        self.context_parallel = ContextParallel(self.qwen3.context.cp)
        self.attention = nn.ModuleList(
            ShardedAttention(
                shape.heads // tp,
                shape.head_dim,
                shape.head_dim**-0.5,
                num_kv_heads=shape.kv_heads // tp,
                cache_config=vllm_config.cache_config,
                prefix=f"model.layers.{i}.self_attn.attn",
                attn_backend=PagedBackend,
                core=native_core if native else canonical_core,
                context_parallel=self.context_parallel,
            )
            for i in range(shape.layers)
        )
        self.record(plan.config.probe, plan.config.probe_row)

    def use(self, ops: Ops) -> None:
        """Computes with these operators from now on."""
        self.ops = ops
        self.record(self.recorder is not None, self.keep)

    def record(self, on: bool, keep: str | None) -> None:
        """Records what every op returns from now on, and the raw words of the row `keep`; or stops it."""
        qwen3, native = self.qwen3, self.ops.name == "native"
        self.keep = keep
        self.recorder = Recorder(qwen3.context, qwen3.shape.layers, native=native, keep=keep) if on else None
        qwen3.ops = ProbedOps(self.ops, self.recorder) if self.recorder else self.ops

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings bf16 [T, hidden] of ids [T]."""
        q = self.qwen3
        return q.ops.embed(q.weights["embed"], input_ids.to(torch.int64), q.context.tp)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Final normed hidden states bf16 [T, hidden] of ids [T] at absolute positions [T]."""
        self.forwards += 1
        if intermediate_tensors is not None or inputs_embeds is not None:
            raise ValueError("pipeline stages and embedded prompts are not supported: send token ids to one stage")
        ids, positions, batch = input_ids.to(torch.int64), positions.to(torch.int64), step_batch()
        cut = self.context_parallel.taken(batch)
        if self.recorder is not None:
            self._announce(self.recorder, batch, positions, None if cut is None else cut.rows[: cut.own])
        if self.page_fault is not None and batch is not None:
            self.page_fault.spoil(batch, self.request_ids(), self.page)
        if cut is None:
            return self.qwen3.forward(ids, positions, self._attend)
        hidden = self.qwen3.forward(ids[cut.rows], positions[cut.rows], self._attend)
        return cut.whole(hidden, "hidden states")

    def _announce(
        self, recorder: Recorder, batch: PagedBatch | None, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> None:
        """Tells whose rows come, those of a cut step alone; the memory profiling run at start-up has no requests and is
        not recorded."""
        recorder.end()
        if batch is not None:
            sample, head = step_rows(batch, self.request_ids())
            recorder.begin("rollout", sample, positions[: sample.numel()], head, rows)

    def compute_logits(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        """Logits bf16 [T, vocabulary], the real columns only, on every rank."""
        return self.qwen3.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads this rank's shards from the checkpoint folder, by the reader that the trainer uses.

        vLLM's own iterator over whole tensors stays unread: slicing them a second way could slice them differently.
        """
        self.reload()
        return set()

    def reload(self) -> None:
        """Returns every weight to the checkpoint's."""
        self.load_stored(checkpoint.load(self.path, self.qwen3.params, self.qwen3.context))

    def load_stored(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters in place, by stored name, in this rank's stored shape; any part of them at a time."""
        self.qwen3.load(stored)

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention[layer](q, k, v)
        return out.view(q.shape)
