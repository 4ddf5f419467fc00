"""The end of a run on GPUs, rehearsed without one: what ranks say becomes a manifest, which the checks find green.

Each plan stands for a kind of process: several ranks an engine with captured exchanges, a trainer that leaves the GPU,
and pages shared between ranks. A field that the manifest would refuse, or that a check would find red, shows here.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rlk.driver.manifest import ManifestMaker, Said
from rlk.driver.processes import Owned
from rlk.driver.run import execute_in
from rlk.evidence import files, layout
from rlk.evidence.checks import processes, settings
from rlk.evidence.checks.tally import Tally
from rlk.evidence.ray_status import Actor, RayStatus
from rlk.evidence.record import Record
from rlk.evidence.writer import RunWriter
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.shape import read_shape
from tests.unit import checkpoints, said_on_gpu, tiny

PLANS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "engines of four ranks that replay graphs": ({"tp": 2, "rollout_tp": 4}, (1, 2, 4, 8)),
    "a trainer that is offloaded": ({"tp": 1, "rollout_tp": 1}, (1, 2)),
    "pages shared by ranks": ({"tp": 8, "rollout_tp": 2, "rollout_cp": 2}, ()),
}
CHECKS = (
    processes.ray, processes.processes, settings.train_settings, settings.engine_settings, settings.kernels,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoints.CONFIG, "num_hidden_layers", 1)
        return checkpoints.write(tmp_path_factory.mktemp("model"))


def make_plan(model: Path, name: str) -> Plan:
    options, graphs = PLANS[name]
    profile = tiny.profile(model=str(model), device="cuda", collectives="cuda-ipc", engine={"kv_cache_bytes": 1 << 26})
    config = RunConfig(**{"max_response_len": 64, "run_id": "rehearsal", **options})
    # Whatever the plan makes of graphs in engines of several ranks: the readback must carry them.
    return dataclasses.replace(derive(config, profile, read_shape(str(model))), graph_sizes=graphs)


@pytest.fixture(scope="module", params=PLANS)
def said(request: pytest.FixtureRequest, model: Path) -> tuple[Plan, Said]:
    plan = make_plan(model, request.param)
    proofs = said_on_gpu.returned([(p.name, p.form, p.sentence) for p in said_on_gpu.PROOFS])
    return plan, Said(proofs, said_on_gpu.train(plan), said_on_gpu.engines(plan))


def write(root: Path, plan: Plan, said: Said) -> Record:
    """Manifest, plan and Ray's status, as a run leaves them, read again."""
    writer, roles = RunWriter.create(root, plan.run_id), said_on_gpu.pids(plan)
    owned = [Owned(pid, 1.5, role) for role, pid in roles.items()]
    maker = ManifestMaker(plan, ("verify",), writer.run_dir, said=said)
    writer.manifest(maker.make("running"))
    writer.plan(plan)
    writer.manifest(maker.make("complete", processes=owned, outlive=True))
    ray = RayStatus("SUCCEEDED", tuple(Actor(role, "ALIVE", pid, "-") for role, pid in roles.items()))
    files.write_new(writer.run_dir / layout.RAY_STATUS, ray.to_text().encode())
    return Record(writer.run_dir)


def red(record: Record) -> dict[str, str]:
    """Message of every check that fails."""
    tallies = {check: Tally(check.__name__, "things") for check in CHECKS}
    for check, tally in tallies.items():
        check(record, tally)
    results = [tally.result() for tally in tallies.values()]
    return {one.name: one.message for one in results if not one.passed}


def test_what_gpu_ranks_say_is_written_and_found_green(said: tuple[Plan, Said], tmp_path: Path) -> None:
    plan, words = said
    record = write(tmp_path, plan, words)
    assert red(record) == {}
    train, engines = record.manifest.readback.train, record.manifest.readback.engines
    assert (len(train), {len(ranks) for ranks in engines}) == (plan.ranks, {plan.engine_ranks})
    for rank in train:
        assert rank.gpu == "NVIDIA H200 GPU-3b1fd8d2-0000-0000-0000-000000000000"
        held = {one.name: one for one in rank.holdings}
        assert held["arenas"].bytes == said_on_gpu.ARENA * ((plan.train.tp > 1) + (plan.train.cp > 1))
        assert held["masters"].during_rollout == ("offloaded" if plan.offload else "resident")
        assert (rank.freed_bytes > 0) == plan.offload


def _changed(words: Said, side: str, **fields: Any) -> Said:
    """The last rank of a side says something else."""
    if side == "train":
        return dataclasses.replace(words, train=[*words.train[:-1], {**words.train[-1], **fields}])
    *others, last = words.engines
    raw = {**last[-1], **{part: {**last[-1][part], **change} for part, change in fields.items()}}
    return dataclasses.replace(words, engines=[*others, [*last[:-1], raw]])


@pytest.mark.parametrize(
    ("side", "fields", "check"),
    [
        ("train", {"transport": "host-staged"}, "train_settings"),
        ("train", {"device": "cpu"}, "train_settings"),
        ("train", {"offload": None}, "train_settings"),
        ("train", {"kernels": {"gemm": "another"}}, "kernels"),
        ("train", {"pid": 7}, "processes"),
        ("engine", {"scheduler": {"graph_sizes": [3]}}, "engine_settings"),
        ("engine", {"worker": {"transport": "host-staged"}}, "engine_settings"),
        ("engine", {"worker": {"kernels": {}}}, "kernels"),
    ],
)
def test_rank_that_says_otherwise_is_red(
    said: tuple[Plan, Said], tmp_path: Path, side: str, fields: dict[str, Any], check: str
) -> None:
    plan, words = said
    fields = {"offload": not plan.offload} if "offload" in fields else fields
    assert set(red(write(tmp_path, plan, _changed(words, side, **fields)))) == {check}


def test_list_for_a_tuple_is_refused(said: tuple[Plan, Said], tmp_path: Path) -> None:
    """The twin: what once stopped a manifest on hardware would stop it here."""
    plan, words = said
    with pytest.raises(ValidationError, match="holdings"):
        write(tmp_path, plan, _changed(words, "train", holdings=list(words.train[-1]["holdings"])))


def test_run_whose_manifest_is_refused_is_sealed_and_red(said: tuple[Plan, Said], tmp_path: Path) -> None:
    """Its steps are done by then: their evidence must not be lost with one field."""
    plan, words = said
    plan = dataclasses.replace(plan, config=plan.config.model_copy(update={"output_root": str(tmp_path)}))
    wrong = _changed(words, "train", holdings=list(words.train[-1]["holdings"]))
    session: Any = SimpleNamespace(
        reset=lambda plan: None,
        run=lambda writer, watch: wrong,
        status=lambda error: RayStatus("FAILED" if error else "SUCCEEDED", ()),
        cluster=SimpleNamespace(ledger=SimpleNamespace(owned=())),
    )
    outcome = execute_in(session, plan, SimpleNamespace())  # type: ignore[arg-type]
    assert not outcome.passed
    assert outcome.errors[0].startswith("ValidationError: ")
    run_dir = Path(outcome.run_dir)
    manifest = Record(run_dir).manifest
    assert (manifest.status, manifest.actors_outlive_run, manifest.readback.train) == ("failed", False, ())
    assert {layout.SUMS, layout.VALIDATION} <= {file.name for file in run_dir.iterdir()}


def test_returned_values_keep_their_types() -> None:
    """Ray's serializer makes no list of a tuple: what the manifest gets is what the rank said."""
    value = {"a": ({"b": 1},), "c": [1, (2.5, None)], "d": 2**64 - 1}
    back = said_on_gpu.returned(value)
    assert back == value
    assert [type(x) for x in (back["a"], back["c"], back["c"][1])] == [tuple, list, tuple]
    assert list(itertools.chain(back)) == ["a", "c", "d"]
