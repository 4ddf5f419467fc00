"""Both sides of the edges in the checks of the oracle, the probe and the whole run: processes, settings, metrics.

Made for mutants, as test_evidence_sample_edges.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.checks.metrics import training_notes
from rlk.evidence.checks.probe import located
from rlk.evidence.errors import EvidenceError
from rlk.evidence.oracle import tolerance
from rlk.evidence.probe import Probe
from rlk.evidence.schemas import Metrics, Readback
from tests.unit.evidence_builder import Change, Draft, build, complete, make_draft
from tests.unit.evidence_faults import on_metrics, on_sample
from tests.unit.evidence_memory import Case, assert_said, cases, held, step_of
from tests.unit.probe_builder import flip


def _oracle_moved(by: float) -> Change:
    """The oracle says another log-probability of the first token that it looked at in step 0."""

    def change(draft: Draft) -> None:
        for name in ("logprob", "least", "most"):
            draft.steps[0].oracle[name][0] += by

    return change


def _keys_that_wrap(draft: Draft) -> None:
    """Keys of one tensor-parallel place whose sum passes 2^64."""
    said: Readback = draft.manifest["readback"]
    (first, second, third, last), *others = said.engines
    total = (second.partitioned.own_key + last.partitioned.own_key) % 2**64
    moved = [
        one.model_copy(update={"partitioned": one.partitioned.model_copy(update={"own_key": key})})
        for one, key in ((second, 2**64 - 1), (last, (total + 1) % 2**64))
    ]
    engines = ((first, moved[0], third, moved[1]), *others)
    draft.manifest["readback"] = said.model_copy(update={"engines": engines})


def _no_rows(draft: Draft) -> None:
    """A rank that saw the steps and computed nothing of them."""
    said: Readback = draft.manifest["readback"]
    (first, *rest), *others = said.engines
    none = first.partitioned.model_copy(update={"own_rows": 0})
    engines = ((first.model_copy(update={"partitioned": none}), *rest), *others)
    draft.manifest["readback"] = said.model_copy(update={"engines": engines})


def _kernels(draft: Draft, times: int) -> None:
    draft.manifest["kernels"] = draft.manifest["kernels"] * times


def _actor(number: int, **values: object) -> Change:
    def change(draft: Draft) -> None:
        actors = list(draft.ray.actors)
        actors[number] = replace(actors[number], **values)
        draft.ray = replace(draft.ray, actors=tuple(actors))

    return change


def _one_pid(draft: Draft) -> None:
    """The first rank of an engine is the process of the first train rank, whoever is asked."""
    pid = draft.ray.actors[0].pid
    at = next(i for i, actor in enumerate(draft.ray.actors) if actor.name == "engine-00-00")
    _actor(at, pid=pid)(draft)
    processes = draft.manifest["processes"]
    draft.manifest["processes"] = tuple(
        p.model_copy(update={"pid": pid}) if p.role == "engine-00-00" else p for p in processes
    )
    said: Readback = draft.manifest["readback"]
    (first, *rest), *others = said.engines
    engines = ((first.model_copy(update={"pid": pid}), *rest), *others)
    draft.manifest["readback"] = said.model_copy(update={"engines": engines})


def _other_replicas(draft: Draft) -> None:
    """TP rank 1 says other log-probs than TP rank 0: tp_replicas is what sees it."""
    for columns in draft.steps[0].trains[2:]:
        columns["logprob"] = columns["logprob"] - np.float32(3)
        columns["update_logprob"] = columns["update_logprob"] - np.float32(3)


SHARED = {"rollout_tp": 2, "rollout_cp": 2}
THREE = {"mix": "0.7/0.95,0,1.3"}  # settings of a batch of four: its second step starts with the first of them again
ORACLE = [
    Case("oracle", "reachable_is_no_flag", r"outside the support that the oracle allows",
         after=lambda draft: draft.steps[0].oracle["reachable"].__setitem__(0, 2)),
    Case("oracle", "above", r"rollout -?\d\S+, the oracle says \S+, allowed -\S+ to -", after=_oracle_moved(-0.5)),
    Case("oracle", "below", r"rollout -?\d\S+, the oracle says \S+, allowed -?\S+ to ", after=_oracle_moved(0.5)),
    Case("oracle", "is_that_of_the_first_replica", None, lambda draft: _other_replicas(draft)),
]  # fmt: skip
RUNS = [
    Case("sampling_settings", "mix_that_does_not_divide_the_batch", None, step=1, options=THREE),
    Case("oracle", "mix_that_does_not_divide_the_batch", None, step=1, options=THREE),
    Case("ray", "restarting", r"train-01 is RESTARTING INTENDED_USER_EXIT", _actor(1, state="RESTARTING")),
    Case("ray", "alive_with_a_good_cause", r"train-01 is ALIVE INTENDED_USER_EXIT", _actor(1, state="ALIVE")),
    Case("processes", "shared_by_two_kinds", r"pid 100 is both train-00 and engine-00-00", _one_pid),
    Case("kernels", "named_twice", r"kernels must name each choice once", lambda draft: _kernels(draft, 2)),
    Case("kernels", "none", r"kernels must name each choice once", lambda draft: _kernels(draft, 0)),
    Case("query_partition", "sum_of_keys_wraps", None, _keys_that_wrap, options=SHARED),
    Case("query_partition", "no_row_of_some_steps", r"0 rows of [1-9]\d* shared steps: it took no part", _no_rows,
         options=SHARED),
    Case("metrics_finite", "infinite", r"step 0: kl is inf, expected a finite", after=on_metrics(0, kl=float("inf"))),
    Case("metrics_finite", "minus_infinite", r"step 0: kl is -inf", after=on_metrics(0, kl=-float("inf"))),
    Case("metrics_finite", "nan", r"step 0: kl is nan", after=on_metrics(0, kl=float("nan"))),
    Case("metrics_finite", "negative", None, after=on_metrics(0, kl=-1e300)),
    Case("two_steps", "three", None, options={"steps": 3}),
    Case("two_steps", "one", r"1 steps, a verify needs 2", options={"steps": 1, "command": "run"}),
    Case("learning_rate", "negative", r"step 1: learning rate is -1", after=on_metrics(1, lr=-1.0)),
    Case("learning_rate", "zero", r"step 1: learning rate is 0", after=on_metrics(1, lr=0.0)),
    Case("gradient_nonzero", "negative", r"zero gradient, grad_norm is -1", after=on_metrics(1, grad_norm=-1.0)),
]  # fmt: skip


@cases([*ORACLE, *RUNS])
def test_edge_is_where_the_rule_says(case: Case) -> None:
    assert_said(case)


def test_wrong_sampling_shows_both_sides() -> None:
    failure = assert_said(
        Case("sampling_settings", "sides", "top_k is 5, the plan asks for -1", on_sample(1, 4, top_k=5), step=1)
    ).failure
    assert failure is not None
    assert failure.left is not None
    assert failure.right is not None
    assert (failure.left.source, failure.left.value) == ("rollout", "5")
    assert (failure.right.source, failure.right.value) == ("plan", "-1")


def test_green_oracle_says_how_near_the_nearest_miss_was() -> None:
    def near(draft: Draft) -> None:
        said = draft.steps[0].oracle
        allowed = tolerance(1.0, float(said["least"][0]), float(said["temperature"][0]))
        said["most"][0] = said["logprob"][0] - 0.8 * allowed

    result = assert_said(Case("oracle", "near", None, after=near))
    assert result.message.endswith("step 0: the largest deviation is 80 % of what is allowed")


def test_failed_oracle_shows_both_sides() -> None:
    failure = assert_said(Case("oracle", "sides", "allowed", after=_oracle_moved(-0.5))).failure
    assert failure is not None
    assert failure.left is not None
    assert failure.right is not None
    assert (failure.left.source, failure.right.source) == ("rollout", "oracle")
    assert failure.left.word is not None


def test_place_that_a_probe_cannot_tell_is_said() -> None:
    draft = complete(make_draft(probe=True))
    step, run = step_of(draft, 0), held(draft)

    def missing() -> tuple[Probe, ...]:
        raise EvidenceError("probe-train-00: missing")

    assert located(run, replace(step, probes=missing)) == "the probe cannot tell where: probe-train-00: missing"
    assert located(run, step) == (
        "every recorded op agrees, the log-probability included: the difference came after it was computed"
    )
    assert located(held(complete(make_draft())), step) is None


PROMPTS, LENGTHS = {4: 2, 5: 2, 6: 3, 7: 3}, {4: 6, 5: 3, 6: 4, 7: 5}  # of step 1


@pytest.mark.parametrize(
    ("role", "array", "indices"),
    [
        ("engine-01-01", "rollout/logits", {0, 1, 2, 3, 4}),
        ("engine-01-01", "rollout/layers.0.qkv", {None, 0, 1, 2, 3, 4}),
        ("train-01", "score/layers.0.qkv", {None, 0, 1, 2, 3, 4}),
    ],
)
def test_place_of_every_row_is_that_of_the_token_that_it_predicts(role: str, array: str, indices: set[object]) -> None:
    probe = next(p for p in complete(make_draft(probe=True)).probes[1] if p.role == role)
    phase, _, op = array.partition("/")
    keys = [probe.arrays[f"{phase}/{'head_' if op == 'logits' else ''}{name}"] for name in ("sample", "position")]
    seen = set()
    for row, (sample, position) in enumerate(zip(*(key.tolist() for key in keys), strict=True)):
        case = Case("probe", "row", op, lambda d, row=row: flip(d.probes[1], role, array, row), step=1,
                    options={"probe": True})  # fmt: skip
        failure = assert_said(case).failure
        assert failure is not None
        index = position + 1 - PROMPTS[sample]
        assert (failure.sample, failure.token_index) == (sample, index if 0 <= index < LENGTHS[sample] else None)
        seen.add(failure.token_index)
    assert indices <= seen


def test_file_that_cannot_be_read_is_named_alone(tmp_path: Path) -> None:
    def garble(run: Path) -> None:
        (run / "metrics.jsonl").write_text("{}: {}\n")

    _, verdict = build(tmp_path, disk=garble)
    failure = verdict.check("schemas").failure
    assert failure is not None
    assert failure.where == "metrics.jsonl line 1"


def _line(**values: object) -> Metrics:
    return complete(make_draft()).metrics[0].model_copy(update=values)


@pytest.mark.parametrize(
    ("values", "notes"),
    [
        ({"truncated_share": 0.0, "nonzero_advantages": 4, "grad_norm": 1.0}, []),
        ({"truncated_share": 0.25, "nonzero_advantages": 4, "grad_norm": 1.0}, ["25 % of the responses"]),
        ({"truncated_share": 0.0, "nonzero_advantages": 0, "grad_norm": 1e-9}, ["from the KL term alone"]),
        ({"truncated_share": 0.0, "nonzero_advantages": 0, "grad_norm": 0.0}, []),
        ({"truncated_share": 0.0, "nonzero_advantages": 0, "grad_norm": -1.0}, []),
    ],
)
def test_notes_beside_a_green_verdict(values: dict[str, object], notes: list[str]) -> None:
    found = list(training_notes((_line(**values),)))
    assert len(found) == len(notes)
    assert all(note in sentence for note, sentence in zip(notes, found, strict=True))
