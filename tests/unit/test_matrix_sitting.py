"""A sitting over a flat list: which cells run, as what, and what a record keeps of a run however it ended.

The pool is made up, the run directories are real: small sealed runs of the evidence builder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import pytest
from click.testing import CliRunner

from rlk.driver.gpus import Gpu
from rlk.driver.run import Outcome
from rlk.evidence import layout
from rlk.evidence.matrix import MatrixEvidence
from rlk.evidence.matrix_detail import CellDetail, left, planned
from rlk.plan.derive import Plan
from rlk.plan.matrix import listed
from tests.unit.evidence_builder import build, make_plan
from tools import matrix, matrix_run

ROOT = Path(__file__).parents[2]
CELL = """
  - id: {}
    sentence: A cell of a list made for a test.
    config: {}
    timeout_s: 9
"""
FIRST, SECOND, THIRD = "tp2_rtp2-cp4-greedy", "tp1_rtp1-cp8-greedy", "tp4_rtp2-cp2-mixed"
FLAT = (
    "format: rlk.cells/1\ncells:\n"
    + CELL.format(FIRST, "{tp: 2, rollout_tp: 2, temperature: 0}")
    + CELL.format(SECOND, "{tp: 1, rollout_tp: 1, temperature: 0}")
    + CELL.format(THIRD, '{tp: 4, rollout_tp: 2, mix: "0,1"}')
)


class Pool:
    """Stands in for the real one: every run is `of_all`, or breaks off where `breaks` has its cell."""

    plans: list[Plan]
    breaks: dict[str, Exception]
    of_all: Path
    stops: bool

    def __init__(self, output: Path) -> None:
        self.run_dir: Path | None = None

    def run(self, plan: Plan, out: TextIO) -> tuple[Plan, Outcome]:
        self.plans.append(plan)
        self.run_dir = self.of_all
        if plan.cell in self.breaks:
            raise self.breaks[plan.cell]
        return plan, Outcome(True, str(self.of_all), 2, 36, 0, "ab" * 32, 1.0, ())

    def stop(self) -> None:
        if not self.stops:
            raise OSError("a process stays")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("good"))[0]


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose last files were never written."""
    run_dir = build(tmp_path_factory.mktemp("bad"))[0]
    for name in (layout.SUMS, layout.VALIDATION, layout.RAY_STATUS, layout.fingerprint_file(2)):
        (run_dir / name).unlink()
    return run_dir


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, good: Path) -> type[Pool]:
    Pool.plans, Pool.breaks, Pool.of_all, Pool.stops = [], {}, good, True
    monkeypatch.setattr(matrix, "Pool", Pool)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Pool


def call(folder: Path, *words: str) -> tuple[int, str]:
    (folder / "flat.yaml").write_text(FLAT)
    fixed = ["--cells", str(folder / "flat.yaml"), "--output", str(folder / "out" / "cells.json")]
    done = CliRunner().invoke(matrix.main, [*fixed, "--runs", str(folder), *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def records(folder: Path) -> dict[str, Any]:
    text = (folder / "out" / "cells.json").read_text()
    MatrixEvidence.from_json(text, "cells.json")
    return {one["id"]: one for one in json.loads(text)["cells"]}


def test_named_cells_run_in_the_order_in_which_they_are_named(pool: type[Pool], tmp_path: Path) -> None:
    assert call(tmp_path, "--cell", THIRD, "--cell", FIRST)[0] == 0, "nothing that was asked for is missing"
    assert [plan.cell for plan in pool.plans] == [THIRD, FIRST]
    assert call(tmp_path, "--cell", SECOND, "--cell", FIRST)[0] == 0
    assert [plan.cell for plan in pool.plans] == [THIRD, FIRST, SECOND], "what passed is not run again"
    assert set(records(tmp_path)) == {FIRST, SECOND, THIRD}, "records of cells that were not named stay"


def test_cell_of_another_name_is_refused(pool: type[Pool], tmp_path: Path) -> None:
    code, output = call(tmp_path, "--cell", "tp9")
    assert code == 2
    assert f"--cell tp9: allowed is one of {FIRST}, {SECOND}, {THIRD}" in output


def test_record_has_what_the_run_left(pool: type[Pool], tmp_path: Path, good: Path) -> None:
    call(tmp_path, "--cell", FIRST)
    detail = records(tmp_path)[FIRST]["detail"]
    assert detail["options"] == {"tp": 2, "rollout_tp": 2, "temperature": 0.0}
    assert (detail["profile"], detail["transport"], detail["run"]) == ("tiny-cpu", "shared-memory", good.name)
    assert detail["sentence"] == "A cell of a list made for a test."
    assert [step["response_tokens"] for step in detail["steps"]] == [18, 18]
    assert {"seconds", "grad_norm", "nonzero_advantages", "events"} <= set(detail["steps"][0])
    assert {"preemptions", "graph_replays"} <= set(detail["steps"][0]["events"][0])
    assert 0 < detail["tensors_changed"] < detail["tensors"]
    assert [kernel["name"] for kernel in detail["kernels"]] == ["gemm", "attention"]
    assert len(detail["train"]) == make_plan().ranks
    assert detail["unread"] == []


def test_options_are_changed_by_field_name(pool: type[Pool], tmp_path: Path) -> None:
    changes = ["--set", 'mix="0.7/0.95,1"', "--set", "temperature=null", "--set", "max_response_len=32", "--steps", "3"]
    assert call(tmp_path, "--cell", FIRST, *changes)[0] == 1, "the run that was made up has two steps"
    (plan,) = pool.plans
    assert (plan.cell, plan.config.max_response_len, plan.config.steps) == ("tp2_rtp2-cp4-mixed", 32, 3)
    assert list(records(tmp_path)) == ["tp2_rtp2-cp4-mixed"]


def test_changed_cell_is_not_the_one_that_passed(pool: type[Pool], tmp_path: Path) -> None:
    call(tmp_path, "--cell", FIRST)
    call(tmp_path, "--cell", FIRST, "--set", "max_response_len=32")
    assert [plan.config.max_response_len for plan in pool.plans] == [64, 32]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "mix=0.7/0.95"], "--set mix=0.7/0.95: allowed is OPTION=JSON"),
        (["--set", "colour=1"], "colour"),
        (["--steps", "1"], "verify allows 2 or more"),
        (["--set", "tp=1", "--set", "rollout_tp=1", "--only", "greedy"], "several cells become"),
    ],
)  # fmt: skip
def test_change_that_cannot_be_is_refused(pool: type[Pool], tmp_path: Path, words: list[str], message: str) -> None:
    code, output = call(tmp_path, *words)
    assert (code, pool.plans) == (2, [])
    assert message in " ".join(output.split())


@pytest.mark.parametrize("words", [["--cell", FIRST], ["--steps", "2"], ["--profile", "tiny-cpu"], ["--set", "tp=1"]])
def test_choices_and_changes_need_a_list(words: list[str]) -> None:
    assert CliRunner().invoke(matrix.main, words).exit_code == 2


def test_list_needs_a_file_of_its_own(tmp_path: Path) -> None:
    done = CliRunner().invoke(matrix.main, ["--cells", "matrices/gpu.yaml"])
    assert done.exit_code == 2
    assert "--cells needs --output" in done.output


def test_profile_of_a_file_replaces_that_of_the_cells(
    pool: type[Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = json.loads((ROOT / "rlk" / "plan" / "profiles" / "tiny-cpu.json").read_text())
    paths = {name: str(ROOT / known[name]) for name in ("model", "prompts")}
    (tmp_path / "mine.json").write_text(json.dumps({**known, **paths, "name": "mine", "prompts_per_step": 2}))
    monkeypatch.chdir(tmp_path)  # a path is one of the caller's folder
    assert call(tmp_path, "--profile", "mine.json", "--only", "rtp1")[0] == 0
    assert [(plan.cell, plan.profile.name, plan.prompts_per_step) for plan in pool.plans] == [(SECOND, "mine", 2)]


@pytest.mark.parametrize("stops", [True, False])
def test_any_exception_is_the_cells_result_and_the_next_one_runs(
    pool: type[Pool], tmp_path: Path, unfinished: Path, stops: bool
) -> None:
    pool.breaks, pool.of_all, pool.stops = {FIRST: ValueError("a list\nfor a tuple")}, unfinished, stops
    (tmp_path / "flat.yaml").write_text(FLAT)
    sheet = matrix.Sheet(tmp_path / "cells.json", listed(tmp_path / "flat.yaml", ROOT))
    made = Pool(tmp_path)
    for cell in sheet.cells:
        one = matrix_run.run(made, cell, native=False, detailed=True, before=None)  # type: ignore[arg-type]
        sheet.kept[cell.id] = one
        sheet.write()
    assert [plan.cell for plan in pool.plans] == [FIRST, SECOND, THIRD]
    one = next(one for one in MatrixEvidence.from_json(sheet.file.read_text(), "x").cells if one.id == FIRST)
    assert not one.passed
    assert one.errors[0] == "ValueError: a list for a tuple"
    assert any("a process stays" in line for line in one.errors) == (not stops)
    assert any("v0002.json: missing" in line for line in one.errors), "what its directory says stands there too"
    assert len(one.errors) <= matrix_run.ERRORS
    assert one.detail is not None
    assert len(one.detail.steps) == 2, "what there is of it is kept"
    assert any("v0002.json: missing" in line for line in one.detail.unread)


def test_failed_record_stays_until_its_cell_runs_again(pool: type[Pool], tmp_path: Path) -> None:
    pool.breaks = {FIRST: RuntimeError("once")}
    call(tmp_path, "--cell", FIRST)
    pool.breaks = {}
    call(tmp_path, "--cell", SECOND, "--cell", FIRST, "--only", "rtp1")
    assert {name: one["passed"] for name, one in records(tmp_path).items()} == {SECOND: True, FIRST: False}
    call(tmp_path, "--cell", FIRST)
    assert records(tmp_path)[FIRST]["passed"]


def test_run_without_a_directory_has_a_detail_too() -> None:
    detail = CellDetail(sentence="A sentence.", device="cpu", **planned(make_plan()), **left(""))
    assert (detail.run, detail.steps, detail.unread) == ("", (), ())


def test_device_names_every_gpu_with_memory_and_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", (9, 0), 143771 << 20) for i in range(3))
    monkeypatch.setattr(matrix_run, "visible_gpus", lambda env: gpus)
    (cell,) = listed(ROOT / "matrices" / "gpu-long.yaml", ROOT)
    two = "NVIDIA H200 143771 MiB; NVIDIA H200 143771 MiB; 4 of 8 ranks of either side on each"
    assert matrix_run.device(cell.plan) == two


def test_long_cell_has_a_plan_and_is_none_of_the_others() -> None:
    (cell,) = listed(ROOT / "matrices" / "gpu-long.yaml", ROOT)
    assert (cell.plan.config.max_response_len, cell.plan.samples_per_step, cell.plan.unbuilt) == (6912, 4, ())
    assert cell.id not in {one.id for one in listed(ROOT / "matrices" / "gpu.yaml", ROOT)}
