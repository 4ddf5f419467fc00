"""One flipped bit in one op of one rank is found: op, layer, token, virtual shard and rank.

Sixteen tokens of two samples, two layers: the least at which a fault has earlier and later ops, another sample and
another layer to be confused with. The trainer is TP2 x CP2 and the engine TP4, as threads, so that rows are split,
shards have different owners on both sides, and replicated ops have replicas. Every op of the program is flipped once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

from rlk.evidence.locate import Search, search_states
from rlk.evidence.place import Place, Side
from rlk.evidence.probe import Probe
from rlk.evidence.program import POLICY, Op, backward, forward, parameters
from rlk.kernels import policy
from rlk.kernels.policy import RowParams
from rlk.model.checkpoint import empty_stored
from rlk.model.layout import parameters as stored_parameters
from rlk.model.ops import CanonicalOps
from rlk.model.parallel import ParallelContext
from rlk.model.policy_probe import ProbedPolicy
from rlk.model.probe import ProbedOps, ProbeError, Recorder
from rlk.model.qwen3 import Qwen3
from rlk.plan.sampling import Sampling
from rlk.plan.shape import ModelShape
from rlk.train.attention import PackedAttention
from rlk.train.batching import MicroBatch, Sample, build
from rlk.train.gradients import Accumulators
from rlk.train.optimizer import AdamSettings, Optimizer
from rlk.train.policy import CanonicalArm
from rlk.train.probe import recorded, recorded_update
from tests.unit.probes import normal
from tests.unit.ranks import on_ranks

LAYERS = 2
SHAPE = ModelShape(
    layers=LAYERS, hidden=32, intermediate=32, heads=16, kv_heads=8, head_dim=8, vocab_size=40, max_positions=32,
    rms_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False, eos_ids=(1,),
)  # fmt: skip
SAMPLES = [
    Sample(7, (3, 9, 4, 17, 30, 2, 21, 8), 3, Sampling(1.0)),
    Sample(8, (5, 11, 6, 39, 12, 33, 1, 10), 2, Sampling(1.0)),
]
SAMPLE, POSITION, RANK, SHARD = 8, 4, 2, 5
"""Where the bit is flipped: engine rank 2 of 4 holds the virtual shards 4 and 5."""
FORWARD, BACKWARD = forward(LAYERS), backward(LAYERS)


class Flipping(Recorder):
    """Flips the lowest bit of one element on its way out of one op, before it is recorded."""

    target: Op | None = None

    def _rows(self, op: Op, x: torch.Tensor) -> None:
        if op == self.target:
            prefix = "head_" if op.head else ""
            at = (self._keys[f"{prefix}sample"] == SAMPLE) & (self._keys[f"{prefix}position"] == POSITION)
            column = x[0].numel() * 3 // 4 if op.sharded else min(1, x[0].numel() - 1)
            for row in at.nonzero()[0].tolist():
                one = x[row].reshape(-1).clone()
                one.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])[column] ^= 1
                x[row] = one.view(x[row].shape)
        super()._rows(op, x)


def weights(context: ParallelContext) -> dict[str, torch.Tensor]:
    """This rank's part of one random model."""
    generator = torch.Generator().manual_seed(5)
    out = {}
    for param in stored_parameters(SHAPE):
        whole = empty_stored(param, ParallelContext())
        whole.normal_(1.0 if whole.dim() == 1 else 0.0, 0.2, generator=generator)
        out[param.name] = whole if param.replicated else whole[list(context.shards)].contiguous()
    return out


def model_of(context: ParallelContext, target: Op | None, keep: str | None = None) -> tuple[Qwen3, Flipping]:
    """A model that records, and flips `target` if there is any."""
    recorder = Flipping(context, LAYERS, native=False, keep=keep)
    recorder.target = target
    return Qwen3(SHAPE, context, ProbedOps(CanonicalOps(), recorder), 32, weights(context)), recorder


def _probe(role: str, context: ParallelContext, recorder: Recorder) -> Probe:
    return Probe(role, context.shards.start, context.slices.start, recorder.take())


def rules(recorder: Recorder) -> ProbedPolicy:
    """The policy, recorded."""
    return ProbedPolicy(policy, recorder, seed=3)


def params_of(batch: MicroBatch) -> RowParams:
    """Settings of a batch's rows."""
    return RowParams.build([(1.0, 1.0, -1)] * 2, SHAPE.vocab_size).rows(batch.owner)


def engine(target: Op | None, rank: int = RANK, keep: str | None = None) -> list[Probe]:
    """What four engine ranks record of a forward pass; `rank` has the fault."""

    def work(context: ParallelContext) -> Probe:
        model, recorder = model_of(context, target if context.tp.rank == rank else None, keep)
        batch = build(SAMPLES, context)
        with recorded(recorder, "rollout", batch):
            hidden = model.forward(batch.ids, batch.positions, PackedAttention(batch, context, save=False))
            rules(recorder).score_rows(model.logits(hidden[batch.rows]), params_of(batch), batch.target)
        return _probe(f"engine-00-{context.tp.rank:02d}", context, recorder)

    return on_ranks(4, 1, work)


def trainer(target: Op | None = None, flipped: tuple[int, int] = (1, 0), keep: str | None = None) -> list[Probe]:
    """What TP2 x CP2 train ranks record of score, update, gradients and optimizer."""

    def work(context: ParallelContext) -> Probe:
        here = (context.tp.rank, context.cp.rank) == flipped
        model, recorder = model_of(context, target if here else None, keep)
        batch, arm = build(SAMPLES, context), CanonicalArm(recorder, rules(recorder))
        params = params_of(batch)
        with recorded(recorder, "score", batch):
            arm.score(model, batch, params)
        sums, optimizer = Accumulators(model.weights, context), Optimizer(model.weights, context)
        coefficients = torch.full((batch.rows.numel(),), -0.125)
        with recorded(recorder, "update", batch):
            arm.accumulate(model, batch, params, coefficients, sums)
        gradients = sums.gradients()
        with recorded_update(recorder, optimizer, gradients):
            optimizer.step(gradients, AdamSettings(1e-3, (0.9, 0.98), 1e-8, 0.1, 1.0))
        return _probe(f"train-{context.tp.rank * 2 + context.cp.rank:02d}", context, recorder)

    return on_ranks(2, 2, work)


@cache
def clean() -> tuple[list[Probe], list[Probe]]:
    """Engine and trainer without a fault."""
    return engine(None), trainer()


def search_forward(engines: list[Probe], trains: list[Probe], keep: str | None = None) -> Search:
    """What the validator does."""
    search = Search(keep)
    for op in FORWARD:
        search.op(op, [Side(p, p, engines if p == "rollout" else trains) for p in ("rollout", "score", "update")])
    return search


def search_runs(ops: tuple[Op, ...], phase: str, left: list[Probe], right: list[Probe]) -> Search:
    """What a comparison of two runs does."""
    search = Search()
    for op in ops:
        search.op(op, [Side("a", phase, left), Side("b", phase, right)])
    return search


def test_engine_and_trainer_agree_on_every_row_of_every_op() -> None:
    search = search_forward(*clean())
    assert search.place is None
    assert search.rows == sum(11 if op.head else 16 for op in FORWARD)


def _of_layer_1(ops: tuple[Op, ...]) -> list[Op]:
    """The ops of one layer, and those that belong to none."""
    return [op for op in ops if not op.name.startswith("layers.") or op.name.startswith("layers.1.")]


def _named(place: Place, *sources: str, alone: bool) -> bool:
    """A replicated op has replicas that outvote the wrong rank; of a shard's two owners either may be the wrong one."""
    return sources == place.odd.sources or (not alone and sources == place.common.sources)


@pytest.mark.parametrize("op", _of_layer_1(FORWARD), ids=lambda op: op.name)
def test_flip_in_one_engine_rank_is_located(op: Op) -> None:
    search = search_forward(engine(op), clean()[1])
    place = search.place
    assert place is not None
    assert (place.op, place.sample, place.position) == (op.name, SAMPLE, POSITION)
    assert place.shard == (SHARD if op.sharded else None)
    assert _named(place, f"rollout engine-00-{RANK:02d}", alone=not op.sharded)
    assert search.wrong == 1


@pytest.mark.parametrize(
    ("name", "element", "elements"),
    [("layers.1.qkv", 16, 32), ("layers.1.o_leaves", 16, 32), ("layers.0.residual", 1, 32), ("logits", 64, 128)],
)
def test_kept_row_names_the_element_and_its_bits(name: str, element: int, elements: int) -> None:
    """A second run with the place of the first: here an engine's flip in the upper half of its second shard."""
    op, keep = next(op for op in FORWARD if op.name == name), f"{name}@{SAMPLE}/{POSITION}"
    search = search_forward(engine(op, keep=keep), trainer(keep=keep), keep)
    assert search.element is not None
    said = re.fullmatch(
        rf"element {element} of {elements}: (\S+ \S+) (\S+) 0x([0-9a-f]+), (\S+ \S+) (\S+) 0x([0-9a-f]+) "
        r"\[1 elements of the row\]",
        search.element,
    )
    assert said, search.element
    assert {said[1], said[4]} & {f"rollout engine-00-{RANK:02d}"}
    assert int(said[3], 16) ^ int(said[6], 16) == 1
    assert len(said[3]) == (8 if name.endswith("leaves") else 4)
    assert said[2] != said[5]
    assert search_forward(engine(op), clean()[1]).element is None


@pytest.mark.parametrize("op", [op for op in _of_layer_1(FORWARD) if not op.head], ids=lambda op: op.name)
def test_flip_in_one_train_rank_is_located(op: Op) -> None:
    # Position 4 of 8 tokens lies in half-slice 8, so in slice 7: in the second CP rank.
    search = search_forward(clean()[0], trainer(op, (1, 1)))
    place = search.place
    assert place is not None
    assert (place.op, place.sample, place.position) == (op.name, SAMPLE, POSITION)
    assert place.shard == (7 if op.sharded else None)
    assert _named(place, "score train-03", "update train-03", alone=not op.sharded)


@pytest.mark.parametrize("op", _of_layer_1(BACKWARD), ids=lambda op: op.name)
def test_flip_in_a_gradient_is_located_between_runs(op: Op) -> None:
    search = search_runs(BACKWARD, "backward", clean()[1], trainer(op, (1, 1)))
    place = search.place
    assert place is not None
    assert (place.op, place.sample, place.position) == (op.name, SAMPLE, POSITION)
    assert place.shard == (7 if op.sharded else None)
    assert place.odd.sources == ("b train-03",)


@pytest.mark.parametrize("name", ["layers.1.qkv", "norm"])
def test_changed_atom_of_a_gradient_is_located(name: str) -> None:
    _, before = clean()
    after = trainer()
    words = after[1].arrays[f"optimizer/grad/{name}"]
    words[-1, 1] ^= 1
    search = Search()
    search_states(
        search, [Side("a", "optimizer", before), Side("b", "optimizer", after)], parameters(LAYERS, tied=False)
    )
    place = search.place
    assert place is not None
    assert (place.op, place.piece) == (f"grad of {name}", 5)
    assert place.shard == (3 if name != "norm" else None)
    assert place.odd.sources == ("b train-01",)


def test_rows_computed_twice_must_agree() -> None:
    engines, trains = engine(None), clean()[1]
    for probe in engines:
        for name, array in probe.arrays.items():
            probe.arrays[name] = torch.cat([torch.from_numpy(array.view("int64"))] * 2).numpy().view(array.dtype)  # type: ignore[index]
    assert search_forward(engines, trains).place is None
    engines[1].arrays["rollout/layers.0.residual"][20, 0] ^= 1
    place = search_forward(engines, trains).place
    assert place is not None
    assert (place.op, place.odd.sources) == ("layers.0.residual", ("rollout engine-00-01",))


def test_rows_missing_on_one_side_are_legal() -> None:
    engines = engine(None)
    head = {"head_sample", "head_position", *(op.name for op in FORWARD if op.head)}
    for probe in engines:
        for name, array in probe.arrays.items():
            probe.arrays[name] = array[1 if name.removeprefix("rollout/") in head else 3 :]  # type: ignore[index]
    search = search_forward(engines, clean()[1])
    assert search.place is None
    assert 0 < search.rows < sum(11 if op.head else 16 for op in FORWARD)


def _bits(ops: Callable[[ParallelContext], ProbedOps | CanonicalOps]) -> list[torch.Tensor]:
    def work(context: ParallelContext) -> torch.Tensor:
        made = ops(context)
        model, batch = Qwen3(SHAPE, context, made, 32, weights(context)), build(SAMPLES, context)
        if isinstance(made, ProbedOps):
            made.recorder.begin("score", batch.positions, batch.positions, batch.rows)
        hidden = model.forward(batch.ids, batch.positions, PackedAttention(batch, context, save=False))
        return model.logits(hidden[batch.rows]).view(torch.int16)

    return on_ranks(2, 2, work)


def test_recording_changes_no_bit_of_the_logits() -> None:
    plain = _bits(lambda c: CanonicalOps())
    probed = _bits(lambda c: ProbedOps(CanonicalOps(), Recorder(c, LAYERS, native=False)))
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
    assert any(a.any() for a in plain)


def test_drawing_and_scoring_record_the_same_steps() -> None:
    """Rows at position 3 and 5 of samples 7 and 8, drawn in one pass and scored in the other; a first call over other
    logits is replaced."""
    recorder = Recorder(ParallelContext(), LAYERS, native=False)
    logits = normal(2, 40, seed=1, scale=4.0)
    params = RowParams.build([(0.7, 0.9, 5), (0.0, 1.0, -1)], 40)
    sample, position = torch.tensor([7, 8]), torch.tensor([3, 5])
    plain = policy.sample_rows(logits, params, torch.full((2,), 3), sample, position + 1)
    taken = []
    for draws in (True, False):
        recorder.begin("score", sample, position, torch.arange(2))
        recorder.program = POLICY
        around = ProbedPolicy(policy, recorder, None if draws else 3)
        around.score_rows(-logits, params, plain[0])
        found = around.sample_rows(logits, params, torch.full((2,), 3), sample, position + 1) if draws else None
        assert found is None or all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        if not draws:
            around.score_rows(logits, params, plain[0])
        taken.append(recorder.take())
    assert taken[0].keys() == taken[1].keys() >= {f"score/{op.name}" for op in POLICY}
    assert all((taken[0][name] == taken[1][name]).all() for name in taken[0])
    assert taken[0]["score/token"].ravel().tolist() == plain[0].tolist()
    assert taken[0]["score/logprob"].ravel().astype("uint32").view("float32").tolist() == plain[1].tolist()


def test_call_out_of_order_stops_the_run() -> None:
    recorder = Recorder(ParallelContext(), LAYERS, native=False)
    ops = ProbedOps(CanonicalOps(), recorder)
    recorder.begin("score", torch.arange(2), torch.arange(2), torch.arange(2))
    with pytest.raises(ProbeError, match="add was called where the program has embedding"):
        ops.add(torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16))


def test_outside_of_a_phase_nothing_is_recorded() -> None:
    recorder = Recorder(ParallelContext(), LAYERS, native=False)
    ops = ProbedOps(CanonicalOps(), recorder)
    ops.add(torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16))
    assert recorder.take() == {}


def test_rows_of_a_cut_step_keep_their_own_places() -> None:
    """A context-parallel engine rank computes some rows of a step, in its own order, and predicts all tokens."""
    recorder = Recorder(ParallelContext(), LAYERS, native=True)
    sample, position = torch.tensor([7, 7, 8]), torch.tensor([4, 5, 0])
    recorder.begin("rollout", sample, position, head=torch.tensor([1, 2]), rows=torch.tensor([2, 0]))
    recorder.output("embed", torch.ones(3, 4))  # two rows and one of padding
    taken = recorder.take()
    assert (taken["rollout/sample"].tolist(), taken["rollout/position"].tolist()) == ([8, 7], [0, 4])
    assert (taken["rollout/head_sample"].tolist(), taken["rollout/head_position"].tolist()) == ([7, 8], [5, 0])
    assert len(taken["rollout/embedding"]) == 2
