"""Between processes on real GPUs, one or several a GPU: the bytes of one process, also captured in a graph.

A rank that stays away is named. What each rank checks is in tools/gpu/collectives.py; tools/gpu_check.py runs it too.
"""

from __future__ import annotations

import os

import pytest

from rlk.driver.gpus import visible_gpus
from tests.consistency.conftest import Sessions
from tests.gpus import WAIT_S, folder, lease

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_has_the_bytes_of_one_process(size: int, sessions: Sessions) -> None:
    sessions.stop()  # it would keep the GPUs of the cells before until the last test
    from tools.gpu.collectives import everything  # here: it needs CUDA's bindings
    from tools.gpu.ranks import on_processes

    found = visible_gpus(os.environ)
    gpus = 1 << min(size, len(found)).bit_length() - 1
    with lease(gpus, found, os.environ, folder(), WAIT_S):
        ranks = on_processes(size, everything, 180)
    assert [r["describe"]["device_of_rank"] for r in ranks] == [[p % gpus for p in range(size)]] * size
    for r in ranks:
        assert r["sums"] == ranks[0]["sums"], "how many elements another order moves"
        assert all(moved > 0 for n, moved in r["sums"].items() if int(n) >= 1000)
        assert r["captured"] == "60 replays of three collectives"
    said = [r["missing"].partition(" (after")[0] for r in ranks]
    words = f"tensor parallel group: rank %d of {size} waited 3 s in 'layers.3.down' and rank {size - 1} did not come"
    assert said == [words % p for p in range(size - 1)] + [f"rank {size - 1} stayed away"]
