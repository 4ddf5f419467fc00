"""Writing files so that a reader never meets half of one, and no file is written twice by mistake."""

from __future__ import annotations

import os
from pathlib import Path


def write_new(path: Path, content: bytes) -> None:
    """Create `path` with `content`, whole or not at all. Raises FileExistsError where there is one already."""
    if path.exists():  # enough, since a run directory has one writer; a hard link would settle it, where there are any
        raise FileExistsError(f"{path.name}: was written before")
    _write_beside(path, content).replace(path)


def replace(path: Path, content: bytes) -> None:
    """Put `content` in the place of `path`, whole or not at all."""
    _write_beside(path, content).replace(path)


def append_line(path: Path, line: str) -> None:
    """Append one line in one write. Raises ValueError for a text of several lines."""
    if "\n" in line:
        raise ValueError(f"{path.name}: a line must not hold a newline")
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())
        os.fsync(file.fileno())


def _write_beside(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return temporary
