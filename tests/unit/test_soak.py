"""A process that grows over a long run is named, and one that only breathes is not.

Twenty-five samples, so that a fifth is five. Memory may end 5 % above the second fifth, descriptors, threads and shared
memory not above its maximum: the first fifth is not looked at, since caches fill then.
"""

from __future__ import annotations

import pytest

from rlk.evidence.resources import Held, growth

FLAT = (100,) * 25
WARM = (10, 60, 90, 95, 99, *(100,) * 20)


def _held(**changed: tuple[int, ...]) -> Held:
    return Held(**{**dict.fromkeys(Held.model_fields, FLAT), **changed})


@pytest.mark.parametrize("series", [FLAT, WARM, (100, 104) * 12 + (100,), tuple(range(200, 100, -4))])
def test_what_stays_within_its_bounds_is_flat(series: tuple[int, ...]) -> None:
    assert list(growth({"train-00": _held(rss=series)})) == []


@pytest.mark.parametrize("name", list(Held.model_fields))
def test_what_grows_is_named_with_its_process(name: str) -> None:
    leak = tuple(range(100, 200, 4))
    (line,) = growth({"train-00": _held(), "engine-00-00": _held(**{name: leak})})
    assert line == f"engine-00-00: {name} grew from 128 to 188"


@pytest.mark.parametrize("name", ["files", "shm", "threads"])
def test_one_more_is_growth_of_anything_but_memory(name: str) -> None:
    assert list(growth({"driver": _held(**{name: (*FLAT[:-1], 101)})})) == [f"driver: {name} grew from 100 to 100"]


def test_too_few_samples_tell_nothing() -> None:
    short = Held(**dict.fromkeys(Held.model_fields, (1, 1, 1, 1)))
    lines = list(growth({"driver": short}))
    assert len(lines) == 4
    assert all("too few to tell" in line for line in lines)
