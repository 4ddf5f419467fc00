"""docs/mutants.md is what the last run of the mutants left; a survivor that nobody explained is said to be one."""

from __future__ import annotations

from pathlib import Path

from tools import mutants_page
from tools.mutants_page import Module, Survivor

ROOT = Path(__file__).parents[2]


def test_page_is_what_the_last_run_left() -> None:
    assert (ROOT / mutants_page.DOCUMENT).read_text(encoding="utf-8") == mutants_page.page(*mutants_page.read(ROOT))


def test_counts_of_each_module_fit_its_survivors() -> None:
    modules, survivors = mutants_page.read(ROOT)
    for one in modules:
        assert one.noticed <= one.run <= one.made <= one.mutants
        assert one.run - one.noticed == sum(1 for s in survivors if s.module == one.module)


def test_unexplained_survivor_is_said_to_be_one() -> None:
    modules = [Module("rlk/evidence/bits.py", 9, 5, 4, 2)]
    known = Survivor("rlk/evidence/bits.py", 7, "return found > 0 => return found != 0", 3, 3)
    odd = Survivor("rlk/evidence/bits.py", 8, "a < b => a <= b", 3, 40)
    page = mutants_page.page(modules, [known, odd])
    assert "4 were run:\n**2 noticed, 2 survived**, of which 1 are explained." in page
    assert "**1: not explained yet.**\n\n- `bits.py:8` (3 of 40 tests) `a < b` → `a <= b`" in page


def test_no_survivor_of_the_last_run_is_left_unexplained() -> None:
    _, survivors = mutants_page.read(ROOT)
    assert survivors
    assert [s for s in survivors if s.why is None] == []
