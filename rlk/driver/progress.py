"""What a waiting user sees: step, phase, tokens and elapsed time; a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.status import Status

log = logging.getLogger(__name__)


class Watch(Protocol):
    """Told of what a run is doing."""

    def phase(self, step: int | None, name: str) -> None:
        """A phase begins; step is None before the first and after the last."""

    def tokens(self, count: int) -> None:
        """More response tokens were generated."""


class LiveView:
    """A Watch that writes to a text stream."""

    def __init__(self, out: TextIO, steps: int) -> None:
        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._status = Status("", console=self._console)
        self._steps, self._tokens, self._start = steps, 0, time.monotonic()

    def phase(self, step: int | None, name: str) -> None:
        """See Watch."""
        place = f"step {step + 1}/{self._steps}  {name}" if step is not None else name
        line = f"{place}  {self._tokens} tokens  {time.monotonic() - self._start:.0f} s"
        log.info(line)  # for whoever follows run.log
        if self._console.is_terminal:
            self._status.update(line)
        else:
            self._console.print(line)

    def tokens(self, count: int) -> None:
        """See Watch."""
        self._tokens += count

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._status.stop()
