"""Paged attention for vLLM: keys and values go to the pages first, then every query row reads its own pages.

One path serves prefill, chunk and decode, so how the scheduler cut a prompt cannot change a bit. The core is passed in:
the canonical kernel, or torch's own attention in native mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from rlk.kernels import attention
from rlk.model.native import sdpa
from rlk.rollout.context_parallel import ContextParallel, ShardedBatch
from rlk.rollout.paging import PagedBatch

PagedCore = Callable[[torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]
"""q [T, H, D], cache [blocks, HK, block, 2D], the step's requests -> [T, H, D]."""


def canonical_core(q: torch.Tensor, cache: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    """The canonical kernel."""
    return attention.paged(q, cache, batch.block_table, batch.query_first, batch.seq_lens)


def native_core(q: torch.Tensor, cache: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    """torch's own attention, one request at a time over its gathered pages: the control."""
    out, d = torch.empty_like(q), q.shape[2]
    first = batch.query_first.tolist()
    for r, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(first[r], first[r + 1])
        if rows.start == rows.stop:
            continue
        pages = cache[batch.block_table[r, : -(-length // cache.shape[2])].long()]
        kv = pages.transpose(1, 2).flatten(0, 1)[:length]
        positions = torch.arange(length - (rows.stop - rows.start), length, device=q.device)
        out[rows] = sdpa(q[rows], kv[..., :d], kv[..., d:], positions)
    return out


class PagedImpl(AttentionImpl):  # type: ignore[misc]
    """One layer's attention; `core` comes from the model through the layer's constructor."""

    supports_pcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        core: PagedCore,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "kv_cache_dtype": None if kv_cache_dtype in ("auto", "bfloat16") else kv_cache_dtype,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise ValueError(f"attention {name} {value}: this model has none: remove it from the model's config")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.core = core

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedBatch | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fills output [T, H, D]; the memory profiling run at start-up comes without requests and gets zeros."""
        if attn_metadata is None:
            return output.zero_()
        batch = attn_metadata
        if isinstance(batch, ShardedBatch):
            pages, batch = batch.update(layer.layer_name, key, value), batch.own
        else:
            pages = kv_cache
            attention.write_pages(key[: batch.tokens], value[: batch.tokens], pages, batch.slots[: batch.tokens])
        output[: batch.tokens] = self.core(query[: batch.tokens], pages, batch)
        output[batch.tokens :] = 0  # padding: nobody reads it, but what lies in memory may be no number
        return output


class PagedBatchBuilder(AttentionMetadataBuilder[PagedBatch]):  # type: ignore[misc]
    """Turns vLLM's description of a step into ours; the runner calls `build` once a step for all layers."""

    # A captured step has one query row a request: what is free in it then are lengths, pages and slots, which a graph
    # reads from the buffers that vLLM fills before it replays it.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block = kv_cache_spec.block_size
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = {name: layers[name] for name in layer_names}
        self.context_parallel: ContextParallel
        (self.context_parallel,) = {layer.context_parallel for layer in self.layers.values()}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedBatch:
        """See vLLM. The common prefix is not used: a query row never depends on its neighbours."""
        m = common_attn_metadata
        batch = PagedBatch(m.num_actual_tokens, m.query_start_loc, m.seq_lens, m.block_table_tensor, m.slot_mapping)
        if self.context_parallel.group.size == 1:
            return batch
        caches = {name: layer.kv_cache for name, layer in self.layers.items()}
        return self.context_parallel.share(batch, self.block, caches, prefill=m.max_query_len > 1)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedBatch:
        """A step to capture; each request is one token long, so that no page that nobody wrote is read."""
        batch = self.build(0, common_attn_metadata)
        batch.seq_lens.fill_(1)
        return batch


class PagedBackend(AttentionBackend):  # type: ignore[misc]
    """The backend that the model hands to each of vLLM's attention layers."""

    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.bfloat16]  # noqa: RUF012 - vLLM declares it as a class variable

    @staticmethod
    def get_name() -> str:
        """vLLM's name for a backend that is not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """See vLLM."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedBatchBuilder]:
        """See vLLM."""
        return PagedBatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Any page size: blocks of 64 keys are counted from position 0, whatever page they are on."""
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, HK, block, 2D]: keys, then values."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size


class ShardedAttention(Attention):  # type: ignore[misc]
    """vLLM's layer with pages of which this rank keeps 1 / size, see rlk.rollout.paging.as_runs."""

    def __init__(self, *args: Any, context_parallel: ContextParallel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_parallel = context_parallel

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM's spec with heads of D / size, so that a page takes 1 / size of its bytes."""
        spec, size = super().get_kv_cache_spec(vllm_config), self.context_parallel.group.size
        return replace(spec, head_size=self.head_size // size, head_size_v=self.head_size_v // size)
