"""Context-parallel ranks of an engine hold the same weights; one that does not shows in the engine's fingerprint.

TP 2 x CP 2, rank = cp_rank * TP + tp_rank: the parts of ranks 0 and 1 add up to the tensor, those of 2 and 3 repeat
them. `norm` is whole on every rank.
"""

from __future__ import annotations

import pytest

from rlk.driver.sync import by_tensor_rank, whole
from rlk.kernels.state import as_hex

PARTS = [{"qkv": (3, 5), "norm": (7, 7)}, {"qkv": (10, 20), "norm": (7, 7)}]
TRUE = {"qkv": as_hex((13, 25)), "norm": as_hex((7, 7))}


def fingerprint(ranks: list[dict[str, tuple[int, int]]]) -> dict[str, str]:
    return whole(by_tensor_rank(ranks, 2), frozenset({"norm"}))


def test_equal_replicas_are_counted_once() -> None:
    assert fingerprint([*PARTS, *PARTS]) == TRUE
    assert fingerprint(PARTS) == TRUE


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", ["qkv", "norm"])
def test_odd_replica_changes_the_fingerprint(name: str, rank: int) -> None:
    ranks = [dict(part) for part in (*PARTS, *PARTS)]
    ranks[rank][name] = (11, 12)
    assert fingerprint(ranks)[name] != TRUE[name]
