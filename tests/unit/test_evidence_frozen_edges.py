"""What was read or found cannot be changed by whoever looks at it next; only a search goes on from op to op."""

from __future__ import annotations

import pkgutil
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import rlk.evidence
from rlk.evidence.documents import Part


def _classes() -> list[Any]:
    names = [info.name for info in pkgutil.walk_packages(rlk.evidence.__path__, "rlk.evidence.")]
    every = [(name, one) for name in names for one in vars(import_module(name)).values()]
    return [one for name, one in every if isinstance(one, type) and one.__module__ == name]


def test_every_dataclass_but_the_search_is_frozen() -> None:
    found = [one for one in _classes() if is_dataclass(one)]
    assert len(found) > 10
    assert [one.__name__ for one in found if not one.__dataclass_params__.frozen] == ["Search"]


def test_every_document_is_frozen_strict_and_closed() -> None:
    found = [one for one in _classes() if issubclass(one, Part)]
    assert len(found) > 10
    for one in found:
        assert [one.model_config[name] for name in ("frozen", "strict", "extra")] == [True, True, "forbid"]
