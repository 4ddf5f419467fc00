"""Ties are cut at the same token whatever the tensor parallelism, also where they lie across an edge between shards.

A head of 1,000 rows, padded to 1,024: an edge every 128 ids at TP 8, every 256 at TP 4, and at 512 for all of them, so
that the ties around 512 belong to two ranks of every degree. The hidden state is one unit vector: a logit is a weight
of the head, exact, and goes through the head's own product and gathering. Each case proves that it is what it says:
the last token kept and the first one dropped have the same logit, and live on two ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from rlk.kernels.policy import RowParams, sample_rows, score_rows
from rlk.model.faults import FaultyOps, FaultyPolicy
from rlk.model.ops import CanonicalOps, Ops
from rlk.model.parallel import ParallelContext
from rlk.model.qwen3 import Qwen3
from rlk.plan.faults import Moment, injection
from tests.unit import tiny
from tests.unit.exact_policy import Exact, exact
from tests.unit.probes import assert_moved, assert_same, bits
from tests.unit.ranks import on_ranks

V, EDGE = 1000, 512
SHAPE = dataclasses.replace(tiny.SHAPE, layers=1, vocab_size=V)
DEGREES = (2, 4, 8)


@dataclass(frozen=True)
class Case:
    """A row of logits, a setting, and the ids that it must keep."""

    row: torch.Tensor
    setting: tuple[float, float, int]
    kept: list[int]


def row_of(rest: float, **groups: list[int]) -> torch.Tensor:
    """A row of `rest`, with the logit N at the ids of the group called xN."""
    row = torch.full((V,), rest)
    for name, ids in groups.items():
        row[ids] = float(name[1:])
    return row.to(torch.bfloat16)


HIGHER = [5, 700, 900]
TIES = [510, 511, 512, 513]
TIED = row_of(-9.0, x3=HIGHER, x2=TIES)
EQUAL = row_of(0.0)
MAXIMA = row_of(-3.0, x4=[511, 512, 700])


def nucleus(kept: int) -> float:
    """The p that keeps as many tokens of TIED at T = 1: the last of them half covered."""
    mass = sorted(exact(TIED, 1.0).mass, reverse=True)
    return (sum(mass[: kept - 1]) + mass[kept - 1] / 2) / sum(mass)


CASES = {
    "k-th logit, cut at the edge": Case(TIED, (1.0, 1.0, 5), [5, 510, 511, 700, 900]),
    "k-th logit, cut behind the edge": Case(TIED, (0.7, 1.0, 6), [5, 510, 511, 512, 700, 900]),
    "nucleus, cut at the edge": Case(TIED, (1.0, nucleus(5), -1), [5, 510, 511, 700, 900]),
    "nucleus, cut behind the edge": Case(TIED, (1.0, nucleus(6), -1), [5, 510, 511, 512, 700, 900]),
    "nucleus within the k kept": Case(TIED, (1.0, 0.8, 6), [5, 510, 700, 900]),
    "equal probabilities, k": Case(EQUAL, (1.3, 1.0, EDGE), list(range(EDGE))),
    "equal probabilities, p": Case(EQUAL, (1.3, EDGE / V, -1), list(range(EDGE))),
    "k = 1 among equal maxima": Case(MAXIMA, (0.7, 1.0, 1), [511]),
    "p so small that one stays": Case(MAXIMA, (1.0, 1e-300, -1), [511]),
    "k = vocabulary": Case(TIED, (1.0, 1.0, V), list(range(V))),
}
CUT = {name: case for name, case in CASES.items() if len(case.kept) < V}


def head(row: torch.Tensor, context: ParallelContext, ops: Ops) -> torch.Tensor:
    """The row as the logits [1, V] of a model whose head holds it, gathered from this rank's and the others' shards."""
    model = Qwen3(SHAPE, context, ops, 8)
    weight = torch.zeros(SHAPE.padded_vocab, SHAPE.hidden, dtype=torch.bfloat16)
    weight[:V, 0] = row
    weight[V:, 0] = 3e38  # padding that would win
    shards = weight.view(8, -1, SHAPE.hidden)
    model.load({"head": shards[context.shards.start : context.shards.stop]})
    hidden = torch.zeros(1, SHAPE.hidden, dtype=torch.bfloat16)
    hidden[0, 0] = 1
    return model.logits(hidden)


def scores(logits: torch.Tensor, setting: tuple[float, float, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and membership of every token."""
    logprob, inside, _ = score_rows(
        logits.expand(V, V).contiguous(), RowParams.build([setting] * V, V), torch.arange(V)
    )
    return logprob, inside


def gathered(row: torch.Tensor, tp: int) -> list[torch.Tensor]:
    return on_ranks(tp, 1, lambda context: head(row, context, CanonicalOps()))


def reference(case: Case) -> Exact:
    return exact(case.row, *case.setting)


@pytest.mark.parametrize("case", CUT.values(), ids=list(CUT))
def test_case_cuts_through_equal_logits_of_two_ranks(case: Case) -> None:
    order = sorted(range(V), key=lambda i: (-case.row[i].float(), i))
    last, first = order[len(case.kept) - 1], order[len(case.kept)]
    assert sorted(order[: len(case.kept)]) == case.kept
    assert case.row[last] == case.row[first], "a tie, and the setting cuts through it"
    tied = [i for i in range(V) if case.row[i] == case.row[last]]
    for tp in DEGREES:
        height = SHAPE.padded_vocab // tp
        assert len({i // height for i in tied}) > 1, f"all on one rank of {tp}"


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_support_and_logprobs_are_those_of_one_rank(case: Case) -> None:
    expected = scores(head(case.row, ParallelContext(), CanonicalOps()), case.setting)
    assert expected[1].nonzero().flatten().tolist() == reference(case).kept == case.kept
    exactly = torch.tensor([reference(case).logprob(t) for t in range(V)], dtype=torch.float64).float()
    assert_same(expected[0], exactly)
    for tp in DEGREES:
        ranks = gathered(case.row, tp)
        for logits in ranks:
            assert_same(logits[0], case.row, f"TP {tp}")
        for found, one in zip(scores(ranks[-1], case.setting), expected, strict=True):
            assert_same(found, one, f"TP {tp}")


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_draws_are_those_of_the_integer_reference(case: Case) -> None:
    n = 64
    params, ids = RowParams.build([case.setting] * n, V), torch.arange(n)
    drawn = [reference(case).draw(3, i, 9) for i in range(n)]
    for tp in DEGREES:
        logits = gathered(case.row, tp)[tp - 1].expand(n, V).contiguous()
        tokens, _ = sample_rows(logits, params, torch.full((n,), 3), ids, torch.full((n,), 9))
        assert tokens.tolist() == drawn
    assert len(set(drawn)) > 1 or len(case.kept) == 1, "the key decides"


@pytest.mark.parametrize("tp", DEGREES)
def test_greedy_takes_the_lowest_of_maxima_on_two_ranks(tp: int) -> None:
    for logits in gathered(MAXIMA, tp):
        token, _ = sample_rows(logits, RowParams.build([(0.0, 0.1, 1)], V), *torch.zeros(3, 1, dtype=torch.int64))
        assert token.tolist() == [511]


@pytest.mark.parametrize("case", [CASES["k = 1 among equal maxima"], CASES["p so small that one stays"]], ids=str)
def test_only_token_has_log_probability_zero(case: Case) -> None:
    logprob, inside = scores(gathered(case.row, 8)[7], case.setting)
    assert bits(logprob[inside]).tolist() == [0], "+0.0, not -0.0"


@pytest.mark.parametrize("tp", DEGREES)
def test_ranks_that_changed_places_would_show(tp: int) -> None:
    """The twin: the same logits with the ids of two ranks exchanged."""
    case, ops = CASES["k-th logit, cut at the edge"], FaultyOps(Moment(injection("ranks-swapped")))
    expected = scores(case.row[None], case.setting)[1]
    for logits in on_ranks(tp, 1, lambda context: head(case.row, context, ops)):
        assert_moved(scores(logits, case.setting)[1], expected, f"TP {tp}")


def test_ties_that_were_kept_would_show() -> None:
    """The twin of top-k: a policy that keeps every token as large as the k-th."""
    case, policy = CASES["k-th logit, cut at the edge"], FaultyPolicy(Moment(injection("ties-kept")))
    params = RowParams.build([case.setting] * V, V)
    _, inside, _ = policy.score_rows(case.row.expand(V, V).contiguous(), params, torch.arange(V))
    assert inside.nonzero().flatten().tolist() == sorted(HIGHER + TIES)
