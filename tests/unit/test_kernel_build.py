"""The kernels' library is built once for its sources, and a machine without a compiler is told what to install."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlk.kernels import build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small source file instead of the kernels, and a cache of its own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_a_library_is_built_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    assert first.is_file()
    monkeypatch.setattr(build, "_compile", None)  # a second build would fail
    assert build.library() == first


@pytest.mark.parametrize("what", ["source", "flag"])
def test_other_sources_or_flags_are_another_library(sources: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    first = build.library()
    if what == "source":
        (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    else:
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert build.library() != first


def test_no_flag_lets_the_compiler_reorder() -> None:
    assert "-ffp-contract=off" in build.FLAGS
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math"} & set(build.FLAGS)


def test_a_compiler_error_is_shown(sources: Path) -> None:
    (sources / "one.cpp").write_text("not C++\n")
    with pytest.raises(build.BuildError, match=r"failed with exit code 1: .*one\.cpp:1"):
        build.library()
    assert not list(build.cache_folder().glob("*.so"))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"among no-such-compiler: install g\+\+ or set CXX"):
        build.compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "clang++" else None)
    assert build.compiler() == "/bin/clang++"
