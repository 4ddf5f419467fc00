"""The validator's side of the oracle: what it looked at, with which weights, and how far both sides may be from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.arrays import OracleArrays
from rlk.evidence.layout import oracle_file
from tests.unit.evidence_builder import Change, Draft, build
from tests.unit.evidence_faults import Fault, assert_caught, everywhere, keep_rows, on_token, parameters


def _said(step: int, sample: int, **values: object) -> Change:
    """Change columns of what one step's oracle says of the least probable token of a sample."""

    def change(draft: Draft) -> None:
        said = draft.steps[step].oracle
        rows = np.flatnonzero(said["sample_id"] == sample)
        for name, value in values.items():
            said[name][rows[said["logprob"][rows].argmin()]] = value

    return change


def _without_row(draft: Draft) -> None:
    draft.steps[1].oracle = {name: column[1:] for name, column in draft.steps[1].oracle.items()}


def _both_sides_wrong(draft: Draft) -> None:
    """Sample 4 has its first log-prob at -3 on both sides."""
    on_token(1, 4, 0, **everywhere(-3.0))(draft)


def _last_token_not_scored(draft: Draft) -> None:
    """The last token of the last sample, made the least probable so that the rule names it, is scored by no rank."""
    on_token(1, 7, 4, **everywhere(-5.0))(draft)
    for columns in draft.steps[1].trains:
        keep_rows(columns, (columns["sample_id"] != 7) | (columns["index"] != 4))


def _old_weights(run: Path) -> None:
    """The oracle of step 1 computed with the weights of step 0."""
    arrays = OracleArrays.read(run / oracle_file(1), "oracle", {"step": 1, "weights": _header(run, 1)})
    (run / oracle_file(1)).write_bytes(arrays.to_bytes({"step": 1, "weights": _header(run, 0)}))


def _header(run: Path, step: int) -> str:
    from safetensors import safe_open

    with safe_open(run / oracle_file(step), framework="np") as file:
        return str(file.metadata()["weights"])


FAULTS = [
    Fault(
        "both_sides_far_from_the_oracle",
        {"oracle"},
        r"oracle: step 1 sample 4 token 0 .*: rollout -3.0, the oracle says -1, allowed -1\.0.* \[3 of \d+ tokens\]",
        before=_both_sides_wrong,
        after=_said(1, 4, logprob=-1.0, least=-1.0, most=-1.0),
    ),
    Fault(
        "token_outside_the_oracles_support",
        {"oracle"},
        r"oracle: step 0 sample 0 token \d .*: outside the support that the oracle allows within its error",
        after=_said(0, 0, reachable=0),
    ),
    Fault(
        "token_that_the_key_does_not_draw",
        {"oracle"},
        r"not what the key draws: [\d.e-]+ lies outside the token's share",
        after=_said(1, 7, below=1.5, through=1.6),
    ),
    Fault(
        "share_that_ends_before_the_draw",
        {"oracle"},
        r"not what the key draws",
        after=_said(1, 7, below=-2.0, through=-1.0),
    ),
    Fault("draw_of_another_key_below", {"oracle"}, r"not what the key draws: -1", after=_said(1, 7, draw=-1.0)),
    Fault("draw_of_another_key_above", {"oracle"}, r"not what the key draws: 2", after=_said(1, 7, draw=2.0)),
    Fault(
        "token_that_was_not_scored",
        {"oracle", "token_coverage"},
        r"oracle: step 1: a token that the oracle looked at was not scored",
        before=_last_token_not_scored,
    ),
    Fault("oracle_looked_away", {"oracle"}, r"step 1: the oracle did not look at the tokens", after=_without_row),
    Fault(
        "oracle_took_another_token",
        {"oracle"},
        r"another token or sampling than the plan's",
        after=_said(1, 4, token=39),
    ),
    Fault(
        "oracle_took_another_temperature",
        {"oracle"},
        r"another token or sampling than the plan's",
        after=_said(1, 4, temperature=0.5),
    ),
    Fault("oracle_says_nan", {"oracle"}, r"a number of the oracle is not finite", after=_said(0, 0, least=np.nan)),
    Fault("oracle_has_an_endless_error", {"oracle"}, r"is not finite", after=_said(0, 0, scale=np.inf)),
    Fault("oracle_used_other_weights", {"oracle"}, r"oracle\.safetensors: header is .*expected", disk=_old_weights),
    Fault(
        "oracle_did_not_run",
        {"oracle", "files"},
        r"oracle: steps/000001/oracle\.safetensors: missing",
        disk=lambda run: (run / oracle_file(1)).unlink(),
    ),
]


@parameters(FAULTS)
def test_each_fault_reddens_only_its_checks(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


@pytest.mark.parametrize(("offset", "passed"), [(0.0, True), (0.001, True), (-0.001, True), (0.1, False)])
def test_only_what_exceeds_the_tolerance_fails(offset: float, passed: bool, tmp_path: Path) -> None:
    """A log-prob of -3 with the largest logit 1: 12 / 256 * (1 - e^-3) = .0445 is allowed."""
    _, verdict = build(
        tmp_path,
        before=_both_sides_wrong,
        after=_said(1, 4, logprob=-3.0 + offset, least=-3.0 + offset, most=-3.0 + offset),
        mix="1.0",
    )
    assert verdict.check("oracle").passed == passed
    if passed:
        share = round(100 * abs(offset) / 0.0445)
        assert f"step 1: the largest deviation is {share} % of what is allowed" in verdict.check("oracle").message


@pytest.mark.parametrize(
    ("edge", "value", "passed"),
    [("below", 0.001, True), ("below", 0.2, False), ("through", -0.001, True), ("through", -0.2, False)],
)
def test_draw_may_miss_its_share_by_the_tolerance(edge: str, value: float, passed: bool, tmp_path: Path) -> None:
    """Both edges of the share are put beside the draw: 12 / 256 * c (1 - c) is at most .0117."""

    def change(draft: Draft) -> None:
        said = draft.steps[1].oracle
        said[edge][0] = said["draw"][0] + value

    _, verdict = build(tmp_path, after=change, mix="1.0")
    assert verdict.check("oracle").passed == passed


def test_greedy_token_is_not_drawn(tmp_path: Path) -> None:
    _, verdict = build(tmp_path, after=_said(0, 0, below=2.0), mix="0")
    assert verdict.check("oracle").passed


@pytest.mark.parametrize(("mode", "passed"), [("native", True), ("consistency", False)])
def test_native_mode_is_looked_at_and_not_judged(mode: str, passed: bool, tmp_path: Path) -> None:
    """vLLM's own sampler draws without the key: its tokens fall on the share that the key gives by chance alone."""
    _, verdict = build(tmp_path, after=_said(1, 7, below=1.5, through=1.6), mode=mode, mix="1.0")
    assert verdict.check("oracle").passed == passed


def test_native_mode_does_not_excuse_a_missing_look(tmp_path: Path) -> None:
    _, verdict = build(tmp_path, after=_without_row, mode="native", mix="1.0")
    assert not verdict.check("oracle").passed
