"""What a record of a cell counts of the run behind it: tensors that ended as something else than they began.

Made for mutants, as test_evidence_sample_edges.
"""

from __future__ import annotations

from pathlib import Path

from rlk.evidence.matrix_detail import CellDetail, left, memory, planned
from rlk.evidence.schemas import Holding, Manifest, Readback
from tests.unit.evidence_builder import Draft, build, make_draft, make_plan

HEAD, NORM, Q = "lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


def _moved(draft: Draft) -> None:
    """Of three tensors one goes and comes back, one moves only at first, and one only at last; all others stay."""
    words = {name: f"{digit}" * 16 + ":" + "0" * 16 for name, digit in (("a", 1), ("b", 2))}
    for version, fingerprints in enumerate(draft.fingerprints):
        for name in fingerprints.trainer:
            fingerprints.trainer[name] = words["a"]
        fingerprints.trainer[HEAD] = words["aba"[version]]
        fingerprints.trainer[NORM] = words["abb"[version]]
        fingerprints.trainer[Q] = words["bba"[version]]


def test_changed_tensors_are_those_whose_end_is_not_their_start(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path, before=_moved)
    found = left(str(run_dir))
    assert found["unread"] == ()
    assert found["tensors_changed"] == 2
    assert found["tensors"] == 14


def test_run_that_made_no_directory_has_no_tensors() -> None:
    detail = CellDetail(sentence="A sentence.", device="cpu", **planned(make_plan()), **left(""))
    assert (detail.tensors, detail.tensors_changed, detail.run) == (0, 0, "")


def test_options_of_a_cell_are_those_that_a_run_was_given() -> None:
    sources = {"tp": "cell", "lr": "command line", "seed": "environment", "rollout_tp": "profile", "run_id": "cell",
               "output_root": "command line"}  # fmt: skip
    plan = make_plan(sources=sources)
    assert planned(plan)["options"] == {"tp": 2, "lr": plan.config.lr}


def test_memory_is_that_of_the_first_rank_of_each_side() -> None:
    said: Readback = (fields := make_draft().manifest)["readback"]
    train = tuple(
        one.model_copy(
            update={
                "freed_bytes": 7 + rank,
                "holdings": (Holding(name="weights", bytes=3 + rank, during_rollout="resident"),),
            }
        )
        for rank, one in enumerate(said.train)
    )
    engines = tuple(
        tuple(one.model_copy(update={"kv_cache_bytes": 100 + 10 * e + r}) for r, one in enumerate(ranks))
        for e, ranks in enumerate(said.engines)
    )

    def held(**readback: object) -> dict[str, int]:
        return memory(Manifest(**{**fields, "readback": said.model_copy(update=readback)}))

    assert held(train=train, engines=engines) == {
        "weights (resident)": 3, "given back by the last offload": 7, "kv cache": 100
    }  # fmt: skip
    assert held(train=train, engines=()) == held(train=(), engines=engines) == {}


def test_tensor_that_is_gone_at_the_end_has_changed(tmp_path: Path) -> None:
    def gone(draft: Draft) -> None:
        _moved(draft)
        del draft.fingerprints[-1].trainer[HEAD]

    run_dir, _ = build(tmp_path, before=gone)
    assert left(str(run_dir))["tensors_changed"] == 3
