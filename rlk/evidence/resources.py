"""What the processes of a long run hold, step by step, and whether it stays flat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import ClassVar

from rlk.evidence.documents import Count, Document, Part

SLACK = 0.05
"""Share by which memory may grow from the second fifth of a run to the last: an allocator keeps what it once had."""


class Held(Part):
    """One process over the run, an entry a sample."""

    rss: tuple[Count, ...]
    """Bytes of resident memory."""
    shm: tuple[Count, ...]
    """Bytes of /dev/shm that are mapped."""
    files: tuple[Count, ...]
    """Open descriptors."""
    threads: tuple[Count, ...]


class SoakEvidence(Document):
    """A long run: what it compared, and what each process held at the start of the steps in `steps`."""

    SCHEMA: ClassVar[str] = "rlk.soak/1"

    command: str
    device: str
    versions: dict[str, str]
    revision: str | None
    id: str
    length: Count
    """Steps that the run made."""
    tokens: Count
    mismatches: Count
    seconds: float
    digest: str | None
    passed: bool
    steps: tuple[Count, ...]
    processes: dict[str, Held]
    errors: tuple[str, ...]


def growth(processes: Mapping[str, Held]) -> Iterator[str]:
    """One line for each process and thing of which it held more in the last fifth of the run than in the second."""
    for role, held in processes.items():
        for name in Held.model_fields:
            series: Sequence[int] = getattr(held, name)
            fifth = len(series) // 5
            if fifth == 0:
                yield f"{role}: {len(series)} samples of {name} are too few to tell: 5 are needed"
                continue
            before, after = series[fifth : 2 * fifth], series[-fifth:]
            if name == "rss":
                grown, limit = median(after), (1 + SLACK) * median(before)
            else:
                grown, limit = max(after), max(before)
            if grown > limit:
                yield f"{role}: {name} grew from {median(before):.0f} to {median(after):.0f}"
