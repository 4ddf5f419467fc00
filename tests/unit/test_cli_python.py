"""A command goes on under the profile's interpreter and checkout, once, with the same words."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlk.cli_python import CHECKOUT, go_on
from rlk.plan.config import RunConfig
from rlk.plan.errors import ConfigErrors
from tests.unit.tiny import profile

SAID = [("--tp", "2"), ("--probe", True)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str], dict[str, str]]]:
    """What would have replaced this process."""
    calls: list[tuple[Path, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, env: calls.append((path, words, env)))
    return calls


def elsewhere(folder: Path) -> Path:
    (folder / "rlk").mkdir(parents=True)
    (folder / "rlk" / "__main__.py").write_text("")
    return folder


@pytest.mark.parametrize("changes", [{}, {"python": sys.executable}, {"framework": str(CHECKOUT)}])
def test_same_python_and_checkout_start_nothing(started: list[Any], changes: dict[str, Any]) -> None:
    go_on(profile(**changes), RunConfig(), SAID, {})
    assert started == []


def test_other_checkout_comes_first_in_the_path(started: list[Any], tmp_path: Path) -> None:
    checkout = elsewhere(tmp_path / "other")
    go_on(profile(framework=str(checkout)), RunConfig(command="run"), SAID, {"PYTHONPATH": "/mine", "RLK_LR": "1"})
    ((path, words, env),) = started
    assert str(path) == words[0] == sys.executable
    assert words[1:] == ["-P", "-m", "rlk", "run", "--tp", "2", "--probe"]
    assert env == {"PYTHONPATH": f"{checkout}:/mine", "RLK_LR": "1"}


def test_link_in_another_environment_is_another_python(started: list[Any], tmp_path: Path) -> None:
    """Two virtual environments may link to one program and see other packages."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    go_on(profile(python=str(python)), RunConfig(), SAID, {})
    assert started[0][0] == python


def test_folder_without_the_project_is_refused(started: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=rf"framework {tmp_path}: allowed is a checkout of rlk"):
        go_on(profile(framework=str(tmp_path)), RunConfig(), SAID, {})
    assert started == []
