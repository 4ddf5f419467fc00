"""Matrices: an id is what its configuration derives, one `-k tp2_rtp4` is one cell, and the order never moves.

Five hash seeds, because an order that comes from a set differs between them and breaks collection under xdist.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlk.plan.cells import Cell, load_cells
from rlk.plan.errors import ConfigErrors
from rlk.plan.topology import DEGREES
from tests.unit.tiny import SHAPE, TRAIN, profile

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "matrices" / "smoke.yaml"
CELLS = load_cells(SMOKE)
HALF = profile().engine.kv_cache_bytes // 2

ONE = """
format: rlk.cells/1
cells:
  - id: tp1_rtp1-cp8-greedy
    sentence: One cell to change in tests of the form.
    config: {tp: 1, rollout_tp: 1, temperature: 0}
    timeout_s: 60
"""


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_id_is_what_the_configuration_derives(cell: Cell) -> None:
    plan = cell.plan_on(profile(), SHAPE)
    assert plan.cell == cell.id
    assert plan.config.sources["tp"] == "cell"
    assert plan.unbuilt == ()


def test_wrong_id_is_refused_with_the_right() -> None:
    wrong = CELLS[0].model_copy(update={"id": "tp1_rtp1-cp8-greedy"})
    with pytest.raises(ConfigErrors, match=rf"that of {CELLS[0].id}: correct the id"):
        wrong.plan_on(profile(), SHAPE)


def test_wrong_option_names_its_cell() -> None:
    wrong = CELLS[0].model_copy(update={"config": {"tp": 3, "colour": "red"}})
    with pytest.raises(ConfigErrors) as caught:
        wrong.plan_on(profile(), SHAPE)
    assert [line.startswith(f"cell {CELLS[0].id}: ") for line in caught.value.errors] == [True, True]


def test_a_cell_may_limit_its_engines() -> None:
    wide = CELLS[0].plan_on(profile(), SHAPE)
    cell = CELLS[0].model_copy(update={"engine": {"kv_cache_bytes": HALF}})
    plan = cell.plan_on(profile(), SHAPE)
    assert plan.profile == profile().limited({"kv_cache_bytes": HALF}) != profile()
    assert (plan.cell, plan.config) == (wide.cell, wide.config)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"pages": 12}, "engine: pages 12: Extra inputs are not permitted"),
        ({"kv_cache_bytes": 0}, "engine: kv_cache_bytes 0: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_limit_names_its_cell(engine: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigErrors, match=f"^cell {CELLS[0].id}: profile .*, {message}$"):
        CELLS[0].model_copy(update={"engine": engine}).plan_on(profile(), SHAPE)


def test_tensor_degrees_in_a_word_pick_one_cell() -> None:
    for tp in DEGREES:
        for rollout_tp in DEGREES:
            word = f"tp{tp}_rtp{rollout_tp}"
            picked = [cell.id for cell in CELLS if word in cell.id]
            assert len(picked) <= 1
            assert all(name.startswith(f"{word}-") for name in picked)


def test_smoke_covers_degrees_and_samplings() -> None:
    plans = [cell.plan_on(profile(), SHAPE) for cell in CELLS]
    assert len(plans) == len({plan.cell for plan in plans}) == 8
    assert {(plan.train.tp, plan.train.cp) for plan in plans} == set(TRAIN)
    assert {plan.rollout.tp for plan in plans} == set(DEGREES)
    assert {plan.rollout.cp for plan in plans} == {1, 2}
    slugs = {plan.cell.split("-", 2)[2].removeprefix("rcp2-") for plan in plans}
    assert slugs == {"greedy", "t0.7-p0.95-koff", "t1.3-p0.99-k20", "mixed"}
    assert {"tp2_rtp4", "tp4_rtp2", "tp1_rtp1", "tp8_rtp1"} <= {plan.cell.split("-")[0] for plan in plans}


def test_ids_say_rollout_context_parallelism_and_mode() -> None:
    changes = {"id": "tp2_rtp2-cp4-rcp2-t0.7-poff-koff-native"}
    config = {"tp": 2, "rollout_tp": 2, "rollout_cp": 2, "temperature": 0.7, "mode": "native"}
    cell = CELLS[0].model_copy(update={**changes, "config": config})
    assert cell.plan_on(profile(), SHAPE).rollout.cp == 2


def test_order_is_that_of_the_file() -> None:
    code = f"from rlk.plan.cells import load_cells; print(*[c.id for c in load_cells({str(SMOKE)!r})])"
    listings = set()
    for seed in ("0", "1", "2", "3", "4"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
        )
        listings.add(tuple(run.stdout.split()))
    in_file = [line.split(": ")[1] for line in SMOKE.read_text().splitlines() if line.startswith("  - id: ")]
    assert listings == {tuple(in_file)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rlk.cells/1", "rlk.cells/2", "format rlk.cells/2"),
        ("timeout_s: 60", "timeout_s: 0", r"cells\.0\.timeout_s 0"),
        ("timeout_s: 60", "timeout: 60", r"cells\.0\.timeout 60"),
        ("timeout_s: 60", "timeout_s: 60\n    marks: [slow]", r"cells\.0\.marks\.0 slow"),
        ("One cell to change in tests of the form.", "Short.", r"cells\.0\.sentence Short\."),
        ("{tp: 1,", "{tp: 1, tp: 2,", "key tp said twice"),
        ("cells:", "cells: [", "matrix .*: while parsing"),
        ("    timeout_s: 60\n", "", r"cells\.0\.timeout_s"),
    ],
)
def test_wrong_form_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in ONE
    path = tmp_path / "cells.yaml"
    path.write_text(ONE.replace(old, new))
    with pytest.raises(ConfigErrors, match=message) as caught:
        load_cells(path)
    assert all("\n" not in line for line in caught.value.errors)


def test_form_without_a_fault_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cells.yaml"
    path.write_text(ONE)
    (cell,) = load_cells(path)
    assert (cell.id, cell.timeout_s, cell.marks) == ("tp1_rtp1-cp8-greedy", 60, ("cpu",))


def test_id_said_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cells.yaml"
    row = ONE.split("cells:\n")[1]
    path.write_text(ONE + row)
    with pytest.raises(ConfigErrors, match="cell tp1_rtp1-cp8-greedy: said twice"):
        load_cells(path)


def test_missing_matrix_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="No such file"):
        load_cells(tmp_path / "none.yaml")
