"""docs/evidence/engine-cpu.json, written by the run that proves it: `make engines`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlk.driver.provenance import versions
from tests.consistency import engine_matrix

ROWS = Path(__file__).parents[1] / "docs" / "evidence" / "engine-cpu.json"
SCHEMA = "rlk.engine-evidence/1"
COMMAND = 'pytest -m "full or not full" --write-engines tests/consistency/test_engine_matrix.py'


@dataclass(frozen=True)
class Row:
    """One line of matrices/engine.yaml as one run found it. `digest` is that of all tokens, log-probs and lengths."""

    id: str
    engines: int
    requests: int
    tokens: int
    mismatches: int
    events: dict[str, int]
    widest_step: int
    seconds: float
    digest: str
    passed: bool
    revision: str | None


def read() -> list[Row]:
    """The rows of the last runs."""
    return [Row(**row) for row in json.loads(ROWS.read_text(encoding="utf-8"))["cells"]] if ROWS.exists() else []


def write(new: Sequence[Row]) -> None:
    """Puts new rows in the place of older ones, in the order of the file; rows of lines that it no longer has go."""
    matrix = engine_matrix.load()
    order = [line.id for line in (*matrix.schedules, *matrix.crowds)]
    rows = {row.id: row for row in (*read(), *new) if row.id in order}
    body = {
        "schema": SCHEMA,
        "command": COMMAND,
        "versions": versions(),
        "cells": [asdict(rows[name]) for name in order if name in rows],
    }
    ROWS.write_text(f"{json.dumps(body, indent=1)}\n", encoding="utf-8")
