"""Where a run comes from: a checkout is named with its changes, whatever they are; a copy without git has no name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlk.driver import provenance


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    words = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*words, "init", "-q"], check=True)
    subprocess.run([*words, "commit", "-q", "--allow-empty", "-m", "one"], check=True)


def test_copy_without_git_has_no_revision(checkout: Path) -> None:
    assert provenance.revision() is None
    assert not provenance.repository().dirty


def test_links_and_folders_are_changes_too(checkout: Path) -> None:
    commit(checkout)
    clean = provenance.revision()
    assert clean is not None
    assert "+" not in clean
    seen = {clean}
    (checkout / "folder").mkdir()
    (checkout / "link").symlink_to("folder")
    seen.add(provenance.revision() or "")
    (checkout / "link").unlink()
    (checkout / "link").symlink_to("nowhere")
    seen.add(provenance.revision() or "")
    commit(checkout / "folder")  # a repository of its own, which git lists as one name
    seen.add(provenance.revision() or "")
    assert len(seen) == 4
