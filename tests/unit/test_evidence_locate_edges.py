"""How many rows a search counts, which of them it names, and how a place and its words read.

Made for mutants, as test_evidence_sample_edges: a few words of two or three ranks in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlk.evidence.arrays import F32
from rlk.evidence.bits import show
from rlk.evidence.locate import Search
from rlk.evidence.place import Place, Side, Word
from rlk.evidence.probe import Probe
from rlk.evidence.program import Op, backward, forward, parameters, replicated

OP, CUT = Op("norm", sharded=False), Op("layers.0.qkv", sharded=True)
Rows = dict[int, list[int]]  # words by position, a word a shard


def _side(name: str, *ranks: Rows, op: Op = OP, shard0: int = 0) -> Side:
    probes = []
    for number, rows in enumerate(ranks):
        width = max((len(words) for words in rows.values()), default=1)
        arrays: dict[str, np.ndarray] = {
            f"{name}/sample": np.full(len(rows), 3),
            f"{name}/position": np.array([*rows], np.int64),
            f"{name}/{op.name}": np.array([*rows.values()], np.uint64).reshape(len(rows), width),
        }
        probes.append(Probe(f"rank-{number}", shard0, 0, arrays))
    return Side(name, name, probes)


def _search(*sides: Side, op: Op = OP) -> tuple[Search, int]:
    search = Search()
    return search, search.op(op, sides)


@pytest.mark.parametrize(
    ("left", "others", "rows"),
    [
        ({0: [1], 1: [2]}, [{0: [1], 1: [2]}], 2),
        ({0: [1], 1: [2]}, [{1: [2], 2: [3]}], 1),
        ({0: [1]}, [{1: [2]}], 0),
        ({0: [1]}, [{}], 0),
        ({}, [{0: [1]}], 0),
        ({}, [{}], 0),
        ({}, [{0: [1]}, {0: [1]}], 0),  # of other sides among each other: replicas, and no counterpart of the first
        ({0: [1]}, [{1: [1]}, {0: [1]}], 1),
    ],
)
def test_row_counts_where_the_first_side_and_another_have_it(left: Rows, others: list[Rows], rows: int) -> None:
    sides = [_side("a", left), *(_side(f"b{number}", other) for number, other in enumerate(others))]
    search, counted = _search(*sides)
    assert (counted, search.rows, search.place, search.wrong, search.later) == (rows, rows, None, 0, 0)
    assert str(search) == f"no op differs in {rows} rows"


def test_row_of_several_shards_counts_once_and_as_often_as_its_most_shared_shard() -> None:
    left = _side("a", {0: [1, 2], 1: [3, 4], 2: [5, 6]}, op=CUT, shard0=2)
    upper = _side("b", {0: [2], 1: [4], 2: [6]}, op=CUT, shard0=3)
    assert _search(left, upper, op=CUT)[1] == 3
    lower = Side("b", "b", [*upper.probes, *_side("b", {1: [3]}, op=CUT, shard0=2).probes])
    assert _search(left, lower, op=CUT)[1] == 3


def test_row_that_differs_in_several_shards_is_one_wrong_row() -> None:
    left = _side("a", {0: [1, 2], 1: [3, 4], 2: [5, 6]}, op=CUT, shard0=2)
    right = _side("b", {0: [1, 2], 1: [7, 8], 2: [5, 9]}, op=CUT, shard0=2)
    search, counted = _search(left, right, op=CUT)
    assert (counted, search.rows, search.wrong, search.later) == (3, 3, 2, 0)
    assert search.place is not None
    assert (search.place.shard, search.place.sample, search.place.position) == (2, 3, 1)
    assert str(search) == (
        "layers.0.qkv shard 2 sample 3 position 1: b rank-0 0x0000000000000007, a rank-0 0x0000000000000003 "
        "[2 rows of this op, and 0 later ops]"
    )


def test_rows_of_several_ops_add_up_and_later_ops_are_counted() -> None:
    search = Search()
    for words in ([1], [2], [1], [2]):
        search.op(OP, [_side("a", {4: [1]}), _side("b", {4: words})])
    assert (search.rows, search.wrong, search.later) == (4, 1, 1)


def test_replicas_of_one_side_are_compared_though_no_other_side_has_the_row() -> None:
    search, counted = _search(_side("a", {0: [1]}), _side("b", {1: [2]}, {1: [3]}, {1: [2]}))
    assert counted == 0
    assert search.place is not None
    assert (search.place.common.sources, search.place.odd.sources) == (("b rank-0", "b rank-2"), ("b rank-1",))


def test_common_word_is_that_of_most_ranks_and_of_the_first_where_as_many_have_either() -> None:
    """Ranks vote, whatever their side is called and however often they were asked."""
    for words, common, odd in (
        ([1, 2, 2], 2, 1),
        ([2, 2, 1], 2, 1),
        ([1, 2], 1, 2),
        ([2, 1], 2, 1),
        ([1, 2, 3, 3, 2, 2], 2, 3),
    ):
        search, _ = _search(_side("of my run", *({0: [word]} for word in words)))
        assert search.place is not None
        assert (search.place.common.value, search.place.odd.value) == (common, odd)
    twice = [_side("a", {0: [1]}), _side("b", {0: [2]}, {0: [2]}), _side("c", {0: [1]})]
    search, _ = _search(*twice)
    assert search.place is not None
    assert (search.place.common.value, search.place.odd.value) == (2, 1)


def test_word_is_said_with_the_first_of_those_who_have_it() -> None:
    word = 0x3F8CCCCD
    assert str(Word(("a rank-0",), 255)) == "a rank-0 0x00000000000000ff"
    assert str(Word(("a rank-0", "b rank-1"), 255)) == "a rank-0 and 1 more 0x00000000000000ff"
    assert str(Word(("a rank-0", "b rank-1", "c"), 255, "integer")) == "a rank-0 and 2 more 255"
    assert str(Word(("a rank-0",), word, "fp32")) == "a rank-0 1.1 0x3f8ccccd"
    value: F32 = np.array([word], np.uint32).view(np.float32)
    assert show(value[0]) == "1.1"


@pytest.mark.parametrize(
    ("shard", "sample", "piece", "said"),
    [
        (None, 3, None, "op sample 3 position 5: "),
        (0, 0, None, "op shard 0 sample 0 position 5: "),
        (None, None, 0, "op piece 0: "),
        (7, None, 2, "op shard 7 piece 2: "),
    ],
)
def test_place_reads_as_op_shard_and_row_or_piece(
    shard: int | None, sample: int | None, piece: int | None, said: str
) -> None:
    words: Any = (Word(("a",), 1), Word(("b",), 2))
    place = Place("op", shard, sample, 5, piece, *words)
    assert str(place) == f"{said}b 0x0000000000000002, a 0x0000000000000001"


LAYER = ("input_norm", "qkv", "q_norm", "k_norm", "q_rope", "k_rope", "attention", "o_leaves", "o", "residual",
         "post_norm", "gate_up", "swiglu", "down_leaves", "down", "output")  # fmt: skip
TOKEN = ("policy_logits", "settings", "key", "token", "kept_mass", "logprob")
BACK = ("d_swiglu", "d_gate_up", "d_post_norm", "d_residual", "d_attention", "d_q_rope", "d_k_rope", "d_v", "d_qkv",
        "d_input_norm", "d_input")  # fmt: skip
WHOLE = {"embedding", "input_norm", "o", "residual", "post_norm", "down", "output", "norm", "gathered_logits",
         "d_norm", "d_hidden", "d_post_norm", "d_residual", "d_input_norm", "d_input", *TOKEN}  # fmt: skip
HEAD = {"logits", "gathered_logits", "d_logits", *TOKEN}


def _layers(numbers: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    return [f"layers.{number}.{name}" for number in numbers for name in names]


def test_program_is_the_documented_one() -> None:
    """Order, and of each op whether tensor parallelism cuts it and whether its rows predict a token."""
    plain = tuple(name for name in LAYER if not name.endswith("_leaves"))
    end = ["norm", "logits", "gathered_logits"]
    programs = {
        forward(2): ["embedding", *_layers((0, 1), LAYER), *end, *TOKEN],
        forward(2, native=True): ["embedding", *_layers((0, 1), plain), *end],
        backward(2): ["d_logits", "d_norm", "d_hidden", *_layers((1, 0), BACK)],
    }
    for ops, names in programs.items():
        assert [op.name for op in ops] == names
        for op in ops:
            own = op.name.split(".")[-1]
            assert (op.sharded, op.head) == (own not in WHOLE, own in HEAD), op.name


def test_stored_parameters_stand_in_the_order_of_the_model_and_a_tied_head_is_none_of_them() -> None:
    layer = ("input_norm", "qkv", "q_norm", "k_norm", "o", "post_norm", "gate_up", "down")
    names = ["embed", *_layers((0, 1), layer), "norm"]
    assert list(parameters(2, tied=True)) == names
    assert list(parameters(2, tied=False)) == [*names, "head"]
    assert [name for name in parameters(1, tied=False) if not replicated(name)] == [
        "embed", "layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down", "head"
    ]  # fmt: skip
