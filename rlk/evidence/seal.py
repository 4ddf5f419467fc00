"""SHA256SUMS: one line a file, as coreutils' `sha256sum` writes it, so that `sha256sum -c` reads it too."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rlk.evidence.errors import EvidenceError
from rlk.evidence.layout import SUMS


def walk(run_dir: Path) -> list[str]:
    """Every file below `run_dir`, relative, with `/`, sorted. An empty directory counts, as `name/`.

    Raises EvidenceError for a link or a special file: its content is not in the directory.
    """
    found: list[str] = []
    for folder, folders, files in os.walk(run_dir):
        for name in (*folders, *files):
            path = Path(folder, name)
            relative = path.relative_to(run_dir).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise EvidenceError(f"{relative}: is a link or a special file, a run directory holds plain files")
            if path.is_file():
                found.append(relative)
            elif not any(path.iterdir()):
                found.append(f"{relative}/")
    return sorted(found)


def sums(run_dir: Path) -> dict[str, str]:
    """Relative path to SHA-256 of every file but the seal itself; an empty directory has no bytes to seal."""
    return {name: _hash(run_dir / name) for name in walk(run_dir) if name != SUMS and not name.endswith("/")}


def to_text(found: dict[str, str]) -> str:
    """The text of SHA256SUMS."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items()))


def seal(run_dir: Path) -> None:
    """Write SHA256SUMS over everything in `run_dir`. Raises FileExistsError where it is sealed already."""
    with (run_dir / SUMS).open("x", encoding="utf-8", newline="\n") as file:
        file.write(to_text(sums(run_dir)))
        file.flush()
        os.fsync(file.fileno())


def seal_problems(run_dir: Path) -> tuple[int, list[str]]:
    """How many files were hashed, and a line for each that was changed, removed or added since the seal."""
    found = sums(run_dir)
    try:
        written = (run_dir / SUMS).read_bytes()
    except FileNotFoundError:
        return len(found), [f"{SUMS}: missing, the run was not finished"]
    if written == to_text(found).encode():
        return len(found), []
    sealed = dict(_entries(written))
    lines = [f"{name}: changed since the seal" for name in sealed.keys() & found if sealed[name] != found[name]]
    lines += [f"{name}: removed since the seal" for name in sealed.keys() - found.keys()]
    lines += [f"{name}: added since the seal" for name in found.keys() - sealed.keys()]
    return len(found), sorted(lines) or [f"{SUMS}: is not the text that the files give"]


def _entries(written: bytes) -> list[tuple[str, str]]:
    lines = written.decode("utf-8", errors="replace").splitlines()
    return [(line[66:], line[:64]) for line in lines]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
