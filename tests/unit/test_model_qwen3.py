"""One model: fp32 rotary tables that nothing casts, one place where weights change, and padding that nobody sees.

bf16 has 8 bits of fraction, so the first position that it confuses with another is 257. 724 of the head's 1,024 rows
are padding here. Twelve tokens are enough for every shard and every op to take part.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlk.kernels import attention, pointwise
from rlk.kernels.policy import RowParams, sample_rows
from rlk.model import checkpoint as files
from rlk.model.layout import parameters
from rlk.model.ops import CanonicalOps
from rlk.model.parallel import ParallelContext
from rlk.model.qwen3 import Attend, Qwen3
from rlk.plan.shape import read_shape
from tests.unit import training
from tests.unit.probes import assert_moved, assert_same, bits
from tests.unit.ranks import on_ranks

POSITIONS = (0, 1, 255, 256, 257, 1023)
IDS = torch.tensor([5, 299, 0, 17, 17, 64, 128, 200, 255, 256, 3, 42])


def causal(n: int) -> Attend:
    """Attention of one sequence of n tokens."""
    positions, ends = torch.arange(n), torch.tensor([0, n])
    return lambda _, q, k, v: attention.packed(q, k, v, positions, ends, ends)[0]


def make_model(path: Path, context: ParallelContext | None = None) -> Qwen3:
    context, shape = context or ParallelContext(), read_shape(str(path))
    model = Qwen3(shape, context, CanonicalOps(), max_positions=1024)
    model.load(files.load(path, model.params, context))
    return model


def run(model: Qwen3, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Logits [T, vocabulary] of one sequence."""
    n = ids.numel()
    return model.logits(model.forward(ids, torch.arange(n), causal(n)))


@pytest.fixture
def model(checkpoint: Path) -> Qwen3:
    return make_model(checkpoint)


def test_rotary_tables_are_float32_angles() -> None:
    cos, sin = pointwise.rope_tables(1e6, 128, 1024)
    inverse = 1e6 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    for p in POSITIONS:
        assert_same(cos[p], (p * inverse).cos().float(), f"position {p}")
        assert_same(sin[p], (p * inverse).sin().float(), f"position {p}")


def test_rotary_tables_tell_257_from_256() -> None:
    cos, sin = pointwise.rope_tables(1e6, 128, 1024)
    for table in (cos, sin):
        assert_moved(table[257], table[256], "the next position")
    confused = torch.tensor([256.0, 257.0]).to(torch.bfloat16)
    assert_same(confused[0], confused[1], "a bf16 table would have one angle for both")


def test_a_forward_leaves_the_tables_alone(model: Qwen3) -> None:
    before = [t[list(POSITIONS)].clone() for t in (model.cos, model.sin)]
    run(model)
    model.load(dict(model.weights))
    for t, kept in zip((model.cos, model.sin), before, strict=True):
        assert t.dtype == torch.float32
        assert_same(t[list(POSITIONS)], kept)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_logits_are_the_same_on_every_rank(checkpoint: Path, model: Qwen3, tp: int) -> None:
    for found in on_ranks(tp, 1, lambda context: run(make_model(checkpoint, context))):
        assert_same(found, run(model))


def test_a_longer_batch_changes_no_logit(model: Qwen3) -> None:
    whole = run(model)
    for n in (1, 5, 11):
        assert_same(run(model, IDS[:n]), whole[:n], f"{n} tokens")


def test_a_new_head_is_used_at_once(model: Qwen3) -> None:
    before, hidden = run(model), model.forward(IDS, torch.arange(12), causal(12))
    head = model.weights["head"].clone()
    head[0, 7] = -head[0, 7]
    model.load({"head": head})
    after = model.logits(hidden)
    assert_same(after[:, 7], -before[:, 7] + 0.0, "the changed row")
    after[:, 7] = before[:, 7]
    assert_same(after, before, "all other rows")


@pytest.mark.parametrize("name", ["embed", "layers.0.qkv", "layers.1.down", "layers.1.q_norm", "norm"])
def test_any_new_weight_is_used_at_once(checkpoint: Path, model: Qwen3, name: str) -> None:
    before = run(model)
    changed = -model.weights[name]
    model.load({name: changed})
    fresh = make_model(checkpoint)
    fresh.weights[name].copy_(changed)
    assert_same(run(model), run(fresh))
    assert_moved(run(model), before, "the change")


def test_weights_are_written_in_place(model: Qwen3) -> None:
    places = {name: w.data_ptr() for name, w in model.weights.items()}
    model.load({name: w * 2 for name, w in model.weights.items()})
    assert {name: w.data_ptr() for name, w in model.weights.items()} == places


def test_an_unknown_weight_is_refused(model: Qwen3) -> None:
    with pytest.raises(ValueError, match="lm_head: not a parameter"):
        model.load({"lm_head": model.weights["head"]})


@pytest.mark.parametrize("fault", ["shape", "dtype"])
def test_another_shape_or_dtype_is_refused(model: Qwen3, fault: str) -> None:
    w = model.weights["layers.0.o"]
    with pytest.raises(ValueError, match=r"layers\.0\.o: got .*, allowed is torch\.bfloat16 \(8, 64, 16\)"):
        model.load({"layers.0.o": w[:4] if fault == "shape" else w.float()})


def poison(model: Qwen3) -> int:
    """Writes huge values to the padded rows of the head; how many there were."""
    real, head = model.shape.vocab_size, model.weights[model.head_name].clone()
    head.flatten(0, 1)[real:] = 3e38
    model.load({model.head_name: head})
    return head.flatten(0, 1)[real:].shape[0]


def test_poisoned_padding_changes_no_logit(model: Qwen3) -> None:
    before = run(model)
    assert poison(model) == 724
    assert_same(run(model), before)
    assert run(model).shape == (12, 300)


def test_poisoned_padding_is_never_drawn(model: Qwen3) -> None:
    poison(model)
    n, row = 10_000, run(model)[-1]
    seed, ids, positions = torch.full((n,), 1), torch.arange(n), torch.full((n,), 12)
    params = RowParams.build([(1.5, 1.0, -1)] * n, 300)
    drawn, _ = sample_rows(row.expand(n, 300).contiguous(), params, seed, ids, positions)
    assert int(drawn.max()) < 300
    assert len(drawn.unique()) > 50, "a distribution that could have drawn it"


def test_poisoned_padding_is_not_exported(checkpoint: Path, model: Qwen3) -> None:
    context = ParallelContext()
    before = files.fingerprints(model.params, model.weights, context)
    poison(model)
    assert files.fingerprints(model.params, model.weights, context) == before


def test_padded_rows_get_no_gradient(checkpoint: Path) -> None:
    (step,) = training.run(training.make_plan(checkpoint), 1, 1, training.make_samples(), steps=1)
    for name in ("head", "embed"):
        stored = step.gradients[name].flatten(1)[:, : 128 * 64].reshape(1024, 64)
        assert bits(stored[300:]).unique().tolist() == [0], name
        assert stored[:300].any(), name


def test_tied_embeddings_are_the_head(tied_checkpoint: Path) -> None:
    model = make_model(tied_checkpoint)
    assert (model.head_name, "head" in model.weights) == ("embed", False)
    before, table = run(model), model.weights["embed"].clone()
    table[0, 99] *= 2  # row 99 is not among the ids, so only its own logits may move
    model.load({"embed": table})
    after = run(model)
    assert_moved(after[:, 99], before[:, 99], "the changed row")
    after[:, 99] = before[:, 99]
    assert_same(after, before, "all other rows")


def test_shards_of_a_shape_cover_it_once(checkpoint: Path) -> None:
    for p in parameters(read_shape(str(checkpoint))):
        shards = range(1 if p.replicated else 8)
        counts = {t.hf_name: torch.zeros(t.shape, dtype=torch.int64).view(-1, t.width) for t in p.tensors}
        for r in (r for s in shards for r in p.regions(s)):
            counts[r.hf_name][r.row0 : r.row0 + r.rows, r.col0 : r.col0 + r.cols] += 1
        assert all((count == 1).all() for count in counts.values()), p.name


def test_a_shard_of_qkv_is_q_then_k_then_v(checkpoint: Path) -> None:
    (qkv,) = (p for p in parameters(read_shape(str(checkpoint))) if p.name == "layers.1.qkv")
    found = [dataclasses.astuple(r)[1:] for r in qkv.regions(3)]
    assert found == [(0, 16, 64, 48, 0), (16, 8, 64, 24, 0), (24, 8, 64, 24, 0)]
