"""Physical degrees and the virtual machine that they must not be able to change."""

from __future__ import annotations

from dataclasses import dataclass

VIRTUAL = 8
"""Virtual shards of every tensor-parallel dimension, and virtual slices of every sequence."""

DEGREES = (1, 2, 4, 8)
"""Each is a set of whole subtrees of the eight leaves, so none of them can change a bit."""

VOCABULARY_MULTIPLE = 128 * VIRTUAL
"""Rows to which the vocabulary is padded: never 128 * TP, which would move with the topology."""


@dataclass(frozen=True)
class Topology:
    """Degrees of tensor and context parallelism. In the trainer rank = tp_rank * cp + cp_rank; in an engine vLLM's own
    order, rank = cp_rank * tp + tp_rank."""

    tp: int
    cp: int

    def __post_init__(self) -> None:
        for name, degree in (("tp", self.tp), ("cp", self.cp)):
            if degree not in DEGREES:
                raise ValueError(f"{name} {degree}: allowed is 1, 2, 4 or 8")

    @property
    def ranks(self) -> int:
        """Processes that this topology takes."""
        return self.tp * self.cp


def padded_rows(vocabulary: int) -> int:
    """Rows of the embedding and of the head after padding, the same for every topology."""
    return -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
