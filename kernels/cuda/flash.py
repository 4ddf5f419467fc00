"""FlashAttention-3 as the forward pass of attention (Shah et al., 2024): the library that vLLM brings, at one split.

With one split a row's sum runs over blocks of keys that are counted from position 0, whatever other rows and however
many pages there are. How large a block is, is the library's affair: for heads of 128 it is the same for packed and for
paged keys, as long as a call does not look like one of single rows. The start-up proof asks for rows packed, paged, cut
and alone, and stops a run whose heads or pages get other blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rlk.kernels.attention import LOG2_E
from rlk.kernels.cuda.choice import KernelChoiceError
from rlk.kernels.cuda.launch import take

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
NOT_ONE_ROW = 2
"""The library takes another block size where the longest sequence of queries is said to be one row."""
WHOLE_TILES = 128
"""Pages of a multiple of so many tokens are read tile by tile, rows that nobody wrote included: a NaN there would reach
the rows of others."""


@dataclass(frozen=True)
class Segments:
    """Rows of adjacent positions of one sequence, each segment with the keys up to its last position.

    Of S segments: first int32 [S + 1], rows. keys int32 [S + 1], the row at which the keys of a segment's sequence
    begin, the last unused. lengths int32 [S], how many of them its last row sees.
    """

    first: torch.Tensor
    keys: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, first: torch.Tensor, key_first: torch.Tensor) -> Segments:
        """Arguments as rlk.kernels.attention.packed has them. Waits for the device."""
        rows = positions.numel()
        begins = torch.ones(rows, dtype=torch.bool, device=positions.device)
        begins[1:] = positions[1:] != positions[:-1] + 1
        begins[first[first < rows]] = True
        at = begins.nonzero()[:, 0]
        ends = torch.cat([at, at.new_tensor([rows])])[1:]
        sequence = torch.searchsorted(first, at, right=True) - 1
        keys = torch.cat([key_first[sequence], key_first[-1:]])
        return cls(torch.cat([ends.new_zeros(1), ends]).to(I32), keys.to(I32), (positions[ends - 1] + 1).to(I32))


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See rlk.kernels.attention."""
    if not q.shape[0]:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=F32)
    used, rows, keys = segments.lengths, q.shape[0], k.shape[0]
    out, lse = _forward(q, take(k, BF16), take(v, BF16), segments.first, segments.keys, used, (rows, keys), None, scale)
    return out, (lse * LOG2_E).t().contiguous()


def paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_first: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See rlk.kernels.attention.

    Raises:
        KernelChoiceError: the pages are of a size of which the library reads more than a sequence's own rows.
    """
    d, page = q.shape[2], cache.shape[2]
    if page % WHOLE_TILES == 0:
        raise KernelChoiceError(
            f"RLK_ATTENTION=fa3: pages of {page} tokens: allowed are pages that are no multiple of {WHOLE_TILES}: "
            "change the profile's block_size, or RLK_ATTENTION=triton"
        )
    if not q.shape[0]:
        return torch.empty_like(q)
    k, v = (x.transpose(1, 2) for x in (take(cache, BF16)[..., :d], cache[..., d:]))
    table, most = take(block_table, I32, contiguous=False), (q.shape[0], block_table.shape[1] * page)
    return _forward(q, k, v, take(query_first, I32), None, take(seq_lens, I32), most, table, scale)[0]


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    keys: torch.Tensor | None,
    lengths: torch.Tensor,
    most: tuple[int, int],
    table: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D] and natural log-sum-exp [H, T]. most: bounds of the rows and of the keys of one segment."""
    out, lse, _, _ = _library().fwd(
        take(q, BF16), k, v, None, None, None, torch.empty_like(q), first, keys, None, None, lengths,
        max(NOT_ONE_ROW, most[0]), most[1], table, None, None, None, None, None, None, None, None, scale, True, -1, -1,
        0.0, True, None, 1, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return out, lse


@cache
def _library() -> Any:
    """The operators of the library, loaded without vLLM, whose import takes a trainer many seconds.

    Raises:
        KernelChoiceError: this installation has none.
    """
    spec = find_spec("vllm")
    found = sorted(Path(spec.origin).parent.glob("vllm_flash_attn/_vllm_fa3_C*.so")) if spec and spec.origin else []
    if not found:
        raise KernelChoiceError(
            "RLK_ATTENTION=fa3: vLLM's library _vllm_fa3_C is not installed: install vLLM for CUDA, or "
            "RLK_ATTENTION=triton"
        )
    torch.ops.load_library(str(found[0]))
    return torch.ops._vllm_fa3_C
