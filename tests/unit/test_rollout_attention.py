"""Pages are storage only: whatever page size and page order, each row attends as over contiguous keys.

Three requests in one step: a decode row at 70 (past one block of 64 keys), a chunk of 9 rows that ends at 33, a prompt
of 5. Pages of 8 and 16 in random order, filled with NaN where nothing was written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlk.kernels import attention
from rlk.model.native import sdpa
from tests.unit.vllm_modules import with_vllm

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS, ROWS = [71, 33, 5], [1, 9, 5]


@pytest.fixture(scope="module")
def module() -> Any:
    return with_vllm("vllm_attention")


def sequences() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        [torch.randn(n, heads, DIM, generator=generator).to(torch.bfloat16) for n in LENGTHS]
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def step(module: Any, page: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The batch, its query rows, and a cache that holds the keys of earlier steps."""
    q, k, v = sequences()
    need = [-(-n // page) for n in LENGTHS]
    order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    cache = torch.full((sum(need), KV_HEADS, page, 2 * DIM), float("nan"), dtype=torch.bfloat16)
    table = torch.zeros(len(need), max(need), dtype=torch.int32)
    slots = []
    for r, (pages, n) in enumerate(zip(order.split(need), LENGTHS, strict=True)):
        table[r, : len(pages)] = pages
        position = torch.arange(n)
        slots.append(pages[position // page].long() * page + position % page)
    old = [n - rows for n, rows in zip(LENGTHS, ROWS, strict=True)]
    attention.write_pages(*(torch.cat([t[:n] for t, n in zip(x, old, strict=True)]) for x in (k, v)),
                          cache, torch.cat([s[:n] for s, n in zip(slots, old, strict=True)]))  # fmt: skip
    first = torch.tensor([0, *ROWS]).cumsum(0).to(torch.int32)
    batch = module.PagedBatch(
        sum(ROWS), first, torch.tensor(LENGTHS, dtype=torch.int32), table,
        torch.cat([s[n:] for s, n in zip(slots, old, strict=True)]),
    )  # fmt: skip
    return batch, torch.cat([t[n:] for t, n in zip(q, old, strict=True)]), cache


def run(module: Any, core: Any, page: int) -> torch.Tensor:
    batch, query, cache = step(module, page)
    _, k, v = sequences()
    new = [torch.cat([t[-rows:] for t, rows in zip(x, ROWS, strict=True)]) for x in (k, v)]
    impl = module.PagedImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, core=core)
    output = torch.empty_like(query)
    return impl.forward(None, query, *new, cache, batch, output)  # type: ignore[no-any-return]


def test_canonical_pages_equal_packed_keys(module: Any) -> None:
    q, k, v = sequences()
    rows = [torch.arange(n - rows, n) for n, rows in zip(LENGTHS, ROWS, strict=True)]
    packed, _ = attention.packed(
        torch.cat([t[r] for t, r in zip(q, rows, strict=True)]), torch.cat(k), torch.cat(v), torch.cat(rows),
        torch.tensor([0, *ROWS]).cumsum(0), torch.tensor([0, *LENGTHS]).cumsum(0),
    )  # fmt: skip
    for page in (8, 16):
        paged = run(module, module.canonical_core, page)
        assert torch.equal(paged.view(torch.int16), packed.view(torch.int16)), page


def test_native_pages_equal_contiguous_keys(module: Any) -> None:
    q, k, v = sequences()
    whole = [sdpa(q[i][-ROWS[i] :], k[i], v[i], torch.arange(LENGTHS[i] - ROWS[i], LENGTHS[i])) for i in range(3)]
    assert torch.equal(run(module, module.native_core, 16).view(torch.int16), torch.cat(whole).view(torch.int16))


@pytest.mark.parametrize("core", ["canonical_core", "native_core"])
def test_request_without_rows_changes_nothing(module: Any, core: str) -> None:
    """What a context-parallel rank meets: requests of which it computes no row in this step."""
    batch, query, cache = step(module, 16)
    _, k, v = sequences()
    new = [torch.cat([t[-rows:] for t, rows in zip(x, ROWS, strict=True)]) for x in (k, v)]
    attention.write_pages(*new, cache, batch.slots)
    plain = getattr(module, core)(query, cache, batch)
    with_empty = replace(
        batch,
        query_first=batch.query_first[[0, 0, 1, 2, 2, 3]],
        seq_lens=torch.tensor([0, LENGTHS[0], LENGTHS[1], 0, LENGTHS[2]], dtype=torch.int32),
        block_table=batch.block_table[[2, 0, 1, 0, 2]],
    )
    found = getattr(module, core)(query, cache, with_empty)
    assert torch.equal(found.view(torch.int16), plain.view(torch.int16))


def test_cores_are_told_apart_bitwise(module: Any) -> None:
    ours, native = run(module, module.canonical_core, 16), run(module, module.native_core, 16)
    assert not torch.equal(ours, native)
    assert (ours.float() - native.float()).abs().max() < 0.03


def test_profiling_run_writes_only_zeros(module: Any) -> None:
    impl = module.PagedImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, core=module.canonical_core)
    output = torch.full((3, HEADS, DIM), float("nan"), dtype=torch.bfloat16)
    impl.forward(None, output, output, output, torch.empty(0), None, output)
    assert not output.any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alibi_slopes", [0.5]),
        ("sliding_window", 128),
        ("logits_soft_cap", 30.0),
        ("kv_sharing_target_layer_name", "layers.0"),
        ("kv_cache_dtype", "fp8"),
        ("attn_type", "encoder"),
    ],
)
def test_other_attention_kinds_are_refused(module: Any, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"attention {name} "):
        module.PagedImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, core=module.canonical_core, **{name: value})
