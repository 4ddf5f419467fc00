"""Where the steps of a GPU check put what they saw: one JSON file, rewritten after every entry, so nothing is lost."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("gpu_check")


class Report:
    """Entries of one run. An entry has `passed` true, false, or null where it is a measurement."""

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path, self.started = path, time.monotonic()
        self.data: dict[str, Any] = {"schema": "rlk.gpu-check/1", "environment": environment, "entries": []}
        self.step = ""

    @property
    def failed(self) -> list[str]:
        """Names of the entries that did not pass."""
        return [f"{e['step']}: {e['name']}" for e in self.data["entries"] if e["passed"] is False]

    def add(self, name: str, passed: bool | None, **facts: Any) -> None:
        """Notes one entry."""
        entry = {"step": self.step, "name": name, "passed": passed, **facts}
        self.data["entries"].append(entry)
        self.write()
        log.info("%s", json.dumps(entry))

    def check(self, name: str, call: Callable[[], Any]) -> None:
        """Passes unless `call` raises; its result is noted. An error ends this entry, not the step."""
        start = time.monotonic()
        try:
            facts: dict[str, Any] = {"result": call()}
            passed = True
        except TimeoutError:
            raise
        except Exception as error:
            log.exception("%s", name)
            facts, passed = {"error": f"{type(error).__name__}: {str(error)[:600]}"}, False
            facts["where"] = traceback.format_exc(limit=-2)[-800:]
        self.add(name, passed, seconds=round(time.monotonic() - start, 2), **facts)

    def set(self, key: str, value: Any) -> None:
        """Notes a fact of the whole run."""
        self.data[key] = value
        self.write()

    def write(self) -> None:
        """Writes the file; a reader never sees half of it."""
        self.data["seconds"] = round(time.monotonic() - self.started, 1)
        self.data["failed"] = self.failed
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.rename(self.path)
