"""An engine whose ranks share out query rows and KV pages generates the bytes of one rank alone.

Twelve prompts of 5 to 117 tokens, five samplings mixed, on engines of 1, 2 and 4 context-parallel ranks and on TP 2 x
CP 2. 24 tokens a step cut every prompt, and 18 pages are a quarter of what the sequences fill, so that chunks, pages
taken from the prefix cache and preempted requests all occur at once, in the same schedule for every degree. The twin: a
rank that writes another's rows of each page.
"""

from __future__ import annotations

import pytest

from rlk.driver.ports import ReservedPorts
from rlk.evidence.partition import rows_key
from tests.consistency.engines import make_plan, write_checkpoint
from tests.consistency.rank_cases import TOPOLOGIES, RankCases, on_processes, run_rank

pytestmark = pytest.mark.cpu

SHARED = [name for name, (_, cp) in TOPOLOGIES.items() if cp > 1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[RankCases]:
    model = write_checkpoint(tmp_path_factory.mktemp("models") / "first", 0)
    environment, ports = make_plan(model, budget=64).engine_env, ReservedPorts(len(TOPOLOGIES))
    arguments = (model, dict(zip(TOPOLOGIES, ports.numbers, strict=True)))
    try:
        return on_processes(run_rank, *arguments, environment=environment, timeout_s=300)
    finally:
        ports.release()


def there(ranks: list[RankCases], name: str) -> list[RankCases]:
    """Those that were a rank of this engine, in rank order."""
    tp, cp = TOPOLOGIES[name]
    return ranks[: tp * cp]


@pytest.mark.parametrize("schedule", ["cold", "warm"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_rows_and_pages_change_no_byte(ranks: list[RankCases], name: str, schedule: str) -> None:
    alone = ranks[0].outcomes["cp1", "cold"].words
    assert ranks[0].outcomes["cp1", "warm"].words == alone
    for rank in there(ranks, name):
        assert rank.outcomes[name, schedule].words == alone


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_chunks_cache_hits_and_preemptions_happened(ranks: list[RankCases], name: str) -> None:
    reference = ranks[0].outcomes["cp1", "cold"].events
    for rank in there(ranks, name):
        events = rank.outcomes[name, "cold"].events
        assert events["chunks"] >= 12
        assert events["cached_tokens"] > 0
        assert events["preemptions"] >= 3
        assert {**events, "partitioned_steps": 0} == {**reference, "partitioned_steps": 0}
        assert 0 < events["partitioned_steps"] < events["steps"] or name == "cp1"


@pytest.mark.parametrize("name", SHARED)
def test_every_row_of_shared_steps_had_one_owner(ranks: list[RankCases], name: str) -> None:
    tp, _ = TOPOLOGIES[name]
    for first in range(tp):
        said = [rank.readback[name]["partitioned"] for rank in there(ranks, name)[first::tp]]
        assert len({(one["steps"], one["rows"]) for one in said}) == 1
        assert min(one["own_rows"] for one in said) > 0
        assert sum(one["own_rows"] for one in said) == said[0]["rows"]
        assert sum(one["own_key"] for one in said) % 2**64 == rows_key(0, [range(said[0]["rows"])])


@pytest.mark.parametrize("name", SHARED)
def test_token_takes_its_share_of_the_bytes(ranks: list[RankCases], name: str) -> None:
    tp, cp = TOPOLOGIES[name]
    whole = ranks[0].readback["cp1"]["kv_cache"]["bytes_per_token"]
    assert {rank.readback[name]["kv_cache"]["bytes_per_token"] * tp * cp for rank in there(ranks, name)} == {whole}


@pytest.mark.parametrize("name", SHARED)
def test_replicas_hold_equal_weights(ranks: list[RankCases], name: str) -> None:
    tp, _ = TOPOLOGIES[name]
    places = [rank.readback[name] for rank in there(ranks, name)]
    assert [one["tensor_parallel"]["rank"] for one in places] == [r % tp for r in range(len(places))]
    assert [one["prefill_context_parallel"]["rank"] for one in places] == [r // tp for r in range(len(places))]
    for r, rank in enumerate(there(ranks, name)):
        assert rank.fingerprints[name] == ranks[r % tp].fingerprints[name]


def test_rank_that_writes_anothers_rows_shows(ranks: list[RankCases]) -> None:
    assert ranks[0].outcomes["cp4", "wrong owner"].words != ranks[0].outcomes["cp1", "cold"].words
