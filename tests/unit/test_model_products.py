"""What the start-up proof tries is what a rank multiplies with: the stored shapes of the model's own parameters.

The tiny shape, tied and not, at every tensor-parallel degree; a forgotten weight or a wrong width would leave a kernel
unproved without anyone noticing.
"""

from __future__ import annotations

import dataclasses

import pytest

from rlk.model.layout import parameters
from rlk.model.products import attention_shape, products
from tests.unit.tiny import SHAPE


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_every_product_of_the_model_is_proved(tp: int, tied: bool) -> None:
    shape = dataclasses.replace(SHAPE, tie_word_embeddings=tied)
    stored = {p.name.rpartition(".")[2]: p for p in parameters(shape) if not p.replicated}
    head = stored.pop("embed") if tied else stored.pop("head")
    stored = {**{name: p for name, p in stored.items() if name != "embed"}, "head": head}
    found = products(shape, tp, rows=64, head_rows=16, backward=True)
    assert {p.name: (p.n, p.k) for p in found} == {name: p.shard_shape for name, p in stored.items()}
    assert {p.name for p in found if p.row_parallel} == {"o", "down"}
    assert {(p.shards, p.backward) for p in found} == {(8 // tp, True)}
    assert {p.name: p.rows for p in found}["head"] == 16


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_proved_heads_are_a_ranks_own(tp: int) -> None:
    heads = attention_shape(SHAPE, tp, 32)
    assert (heads.heads * tp, heads.kv_heads * tp, heads.head_dim, heads.page) == (16, 8, 16, 32)
