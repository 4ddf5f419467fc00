"""ray-status.txt: how the run ended, and how each of its actors did, as Ray tells it.

The first line is SUCCEEDED or FAILED. Then one line an actor, in any order: `name state pid cause`, separated by
one space. `state` is Ray's. `cause` is `-` while the actor lives; else Ray's reason, or the worker's exit type
where the reason is WORKER_DIED, since only that tells a request to leave from a crash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlk.evidence.errors import EvidenceError
from rlk.evidence.layout import RAY_STATUS

_OUTCOMES = ("SUCCEEDED", "FAILED")
_STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "DEAD")
_ACTOR = re.compile(r"([a-z0-9-]+) ([A-Z_]+) ([0-9]+) (-|[A-Z_]+)")

# An actor that left because it was asked to, or because its last handle was dropped. RAY_KILL is not among them:
# an actor that had to be killed did not end well.
CLEAN_CAUSES = frozenset({"INTENDED_USER_EXIT", "OUT_OF_SCOPE", "REF_DELETED"})


@dataclass(frozen=True)
class Actor:
    """One actor: the role it was started for (layout.py), Ray's state, pid (0 before it has one) and cause."""

    name: str
    state: str
    pid: int
    cause: str

    def __post_init__(self) -> None:
        if not _ACTOR.fullmatch(self.line()):
            raise EvidenceError(f"{RAY_STATUS}: {self.line()!r} is not 'name state pid cause'")
        if self.state not in _STATES:
            raise EvidenceError(f"{RAY_STATUS}: {self.name} has state {self.state!r}, Ray knows {', '.join(_STATES)}")

    def line(self) -> str:
        """The actor's line in the file."""
        return f"{self.name} {self.state} {self.pid} {self.cause}"


@dataclass(frozen=True)
class RayStatus:
    """The whole file."""

    outcome: str
    actors: tuple[Actor, ...]

    def __post_init__(self) -> None:
        if self.outcome not in _OUTCOMES:
            raise EvidenceError(f"{RAY_STATUS}: the first line is {self.outcome!r}, SUCCEEDED or FAILED is needed")

    def to_text(self) -> str:
        """The file's text."""
        return "".join(f"{line}\n" for line in (self.outcome, *(actor.line() for actor in self.actors)))

    @classmethod
    def from_text(cls, text: str) -> RayStatus:
        """Read what `to_text` wrote; EvidenceError for anything else."""
        if not text.endswith("\n"):
            raise EvidenceError(f"{RAY_STATUS}: does not end with a newline, so it may be cut")
        outcome, *rest = text[:-1].split("\n")
        return cls(outcome, tuple(_actor(line) for line in rest))


def _actor(line: str) -> Actor:
    match = _ACTOR.fullmatch(line)
    if match is None:
        raise EvidenceError(f"{RAY_STATUS}: {line!r} is not 'name state pid cause'")
    name, state, pid, cause = match.groups()
    return Actor(name, state, int(pid), cause)
