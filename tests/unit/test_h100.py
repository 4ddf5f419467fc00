"""The matrix of eight GPUs: what it holds, and that a sitting goes on where the last one ended.

The runs are made up: what is tested is the order, the limits and what a record keeps of both arms.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TextIO

import pytest
from click.testing import CliRunner

from rlk.driver.errors import RunError
from rlk.driver.run import Outcome
from rlk.evidence.matrix import MatrixEvidence
from rlk.plan.cells import load_cells
from rlk.plan.derive import Plan
from rlk.plan.matrix import listed
from rlk.plan.topology import DEGREES
from tools import matrix, matrix_page, matrix_run

ROOT = Path(__file__).parents[2]
CELLS = load_cells(ROOT / "matrices" / "h100.yaml")
PLANS = [cell.plan(ROOT) for cell in CELLS]
CALL_S = 600

FLAT = """
format: rlk.cells/1
cells:
  - id: tp2_rtp2-cp4-greedy
    sentence: The first of two cells to run.
    config: {tp: 2, rollout_tp: 2, temperature: 0}
    timeout_s: 9
  - id: tp1_rtp1-cp8-greedy
    sentence: The second of two cells to run.
    config: {tp: 1, rollout_tp: 1, temperature: 0}
    timeout_s: 9
"""


def test_every_pair_of_topologies_stands_in_it() -> None:
    train = [(tp, cp) for tp, cp in product(DEGREES, DEGREES) if tp * cp == 8]
    rollout = [(tp, cp) for tp, cp in product(DEGREES, DEGREES) if tp * cp <= 8]
    found = {((p.train.tp, p.train.cp), (p.rollout.tp, p.rollout.cp)) for p in PLANS if "mixed" in p.cell}
    assert found == set(product(train, rollout))
    assert len(found) == 40


def test_model_has_the_sizes_of_qwen3_8b_and_every_rank_a_gpu() -> None:
    for plan in PLANS:
        shape = plan.shape
        assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.vocab_size) == (36, 4096, 32, 8, 151936)
        assert (plan.profile.gpus, plan.ranks) == (8, 8)
        assert plan.unbuilt == ()


def test_the_command_lines_come_first_and_the_long_one_before_them() -> None:
    long, first, second, *corners = PLANS[:6]
    assert (long.config.max_response_len, long.max_model_len) == (6912, 6912 + long.profile.max_prompt_len)
    assert [(p.train.tp, p.train.cp, p.rollout.tp, p.rollout.cp) for p in (long, first, second, *corners)] == [
        (2, 4, 4, 1),
        (2, 4, 4, 1),
        (4, 2, 2, 1),
        (1, 8, 1, 1),
        (8, 1, 8, 1),
        (4, 2, 1, 8),
    ]
    assert (second.config.temperature, second.config.top_p, second.config.top_k) == (1.3, 0.99, 128)


def test_limits_fall_and_fit_one_call() -> None:
    limits = [cell.timeout_s for cell in CELLS]
    assert all(before >= after for before, after in pairwise(limits))
    assert max(limits) < CALL_S


def test_mixed_batch_has_nucleus_and_top_k_both_and_neither() -> None:
    kinds = {(s.top_p < 1, s.top_k > 0) for s in PLANS[-1].config.samplings}
    assert kinds == set(product((True, False), repeat=2))


def test_page_says_of_every_cell_what_ran() -> None:
    """No machine of this kind runs the unit tests: the page must follow from the evidence that is there, or none."""
    file = ROOT / "docs" / "evidence" / "h100-matrix.json"
    none = MatrixEvidence(command="", device="", versions={}, cells=())
    evidence = MatrixEvidence.from_json(file.read_text(), file.name) if file.exists() else none
    cells = listed(ROOT / "matrices" / "h100.yaml", ROOT)
    assert (ROOT / "docs" / "h100.md").read_text() == matrix_page.costs(cells, evidence, file.name)


class Pool:
    """Stands in for the real one: runs nothing, and fails or hangs where it is told to."""

    ran: list[str]
    fails: dict[str, str]

    def __init__(self, output: Path) -> None:
        self.stopped, self.run_dir = 0, None

    def run(self, plan: Plan, out: TextIO) -> tuple[Plan, Outcome]:
        self.ran.append(plan.cell)
        if self.fails.get(plan.cell) == "raise":
            raise RunError("start: no answer from train-03")
        if self.fails.get(plan.cell) == "hang":
            time.sleep(30)
        wrong = 7 if plan.config.mode == "native" else 0
        return plan, Outcome(not wrong, "", 2, 100, wrong, "ab" * 32, 1.0, ())

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    Pool.ran, Pool.fails = [], {}
    monkeypatch.setattr(matrix, "Pool", Pool)
    monkeypatch.setattr(matrix_run, "_step_seconds", lambda outcome: (3.0, 2.5) if outcome.steps else ())
    monkeypatch.setattr(matrix_run, "_memory", lambda outcome: {"kv cache": 64})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Pool


def sitting(folder: Path, *words: str, cells: str = FLAT) -> tuple[int, dict[str, Any]]:
    """Exit code and, by id, the records of one call of the command."""
    (folder / "flat.yaml").write_text(cells)
    fixed = ["--cells", str(folder / "flat.yaml"), "--output", str(folder / "out.json"), "--runs", str(folder)]
    done = CliRunner().invoke(matrix.main, [*fixed, "--page", str(folder / "page.md"), "--native", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    text = (folder / "out.json").read_text()
    MatrixEvidence.from_json(text, "out.json")
    return done.exit_code, {one["id"]: one for one in json.loads(text)["cells"]}


def test_both_arms_of_every_cell_are_recorded(pool: type[Pool], tmp_path: Path) -> None:
    code, found = sitting(tmp_path)
    assert code == 0
    assert pool.ran == [f"{name}{arm}" for name in found for arm in ("", "-native")]
    one = found["tp2_rtp2-cp4-greedy"]
    assert (one["tokens"], one["mismatches"], one["step_seconds"], one["memory"]) == (
        100,
        0,
        [3.0, 2.5],
        {"kv cache": 64},
    )
    assert one["native"] == {"tokens": 100, "mismatches": 7, "step_seconds": [3.0, 2.5]}
    page = (tmp_path / "page.md").read_text()
    assert "2 of 2 cells were run" in page
    assert "| tp1_rtp1-cp8-greedy | 2 | 100 | 0 | `abababababababab` | 3.0, 2.5 | 7 of 100 | 3.0, 2.5 |" in page


def test_next_sitting_runs_only_what_is_missing(pool: type[Pool], tmp_path: Path) -> None:
    assert sitting(tmp_path, "--only", "tp1")[0] == 1, "a cell is missing"
    assert "| tp2_rtp2-cp4-greedy | not run |" in (tmp_path / "page.md").read_text()
    pool.ran.clear()
    assert sitting(tmp_path)[0] == 0
    assert pool.ran == ["tp2_rtp2-cp4-greedy", "tp2_rtp2-cp4-greedy-native"]
    pool.ran.clear()
    assert sitting(tmp_path)[0] == 0
    assert pool.ran == []


def test_missing_native_arm_is_made_up_for_alone(pool: type[Pool], tmp_path: Path) -> None:
    pool.fails = {"tp2_rtp2-cp4-greedy-native": "raise"}
    assert sitting(tmp_path)[1]["tp2_rtp2-cp4-greedy"]["native"] is None
    pool.ran.clear()
    pool.fails = {}
    assert sitting(tmp_path)[1]["tp2_rtp2-cp4-greedy"]["native"] is not None
    assert pool.ran == ["tp2_rtp2-cp4-greedy-native"]


def test_cell_that_failed_waits_for_those_that_were_not_tried(pool: type[Pool], tmp_path: Path) -> None:
    pool.fails = {"tp2_rtp2-cp4-greedy": "raise"}
    code, found = sitting(tmp_path, "--only", "tp2")
    assert code == 1
    assert found["tp2_rtp2-cp4-greedy"]["errors"] == ["start: no answer from train-03"]
    pool.ran.clear()
    pool.fails = {}
    assert sitting(tmp_path)[0] == 0
    assert pool.ran[0] == "tp1_rtp1-cp8-greedy"


def test_cell_over_its_limit_is_red_and_the_next_one_runs(pool: type[Pool], tmp_path: Path) -> None:
    pool.fails = {"tp2_rtp2-cp4-greedy": "hang"}
    code, found = sitting(tmp_path, cells=FLAT.replace("timeout_s: 9", "timeout_s: 1"))
    assert code == 1
    assert found["tp2_rtp2-cp4-greedy"]["errors"] == ["tp2_rtp2-cp4-greedy: not done within 1 s"]
    assert found["tp1_rtp1-cp8-greedy"]["passed"]


def test_machine_that_is_refused_runs_nothing(
    pool: type[Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (tmp_path / "flat.yaml").write_text(FLAT)
    words = ["--cells", str(tmp_path / "flat.yaml"), "--output", str(tmp_path / "out.json"), "--page", ""]
    done = CliRunner().invoke(matrix.main, words)
    assert done.exit_code == 2
    assert "RAY_ADDRESS=10.0.0.1:6379: a cluster is joined only where" in done.output
    assert pool.ran == []
    assert not (tmp_path / "out.json").exists()


def test_rehearsal_runs_the_cells_on_another_profile(pool: type[Pool], tmp_path: Path) -> None:
    cells = FLAT.replace("timeout_s: 9", "timeout_s: 9\n    profile: nowhere")
    code, found = sitting(tmp_path, "--profile", "tiny-cpu", "--only", "tp1", cells=cells)
    assert (code, list(found)) == (0, ["tp1_rtp1-cp8-greedy"])
