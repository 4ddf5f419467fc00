"""Do both sides compute the right thing? Some tokens against an independent model, within the error that bf16 has."""

from __future__ import annotations

import numpy as np

from rlk.evidence.arrays import OracleArrays, length_problem
from rlk.evidence.bits import hex_word
from rlk.evidence.checks.tally import Tally, token_place
from rlk.evidence.errors import EvidenceError
from rlk.evidence.layout import oracle_file
from rlk.evidence.oracle import looked_at, share_tolerance, tolerance, uniform
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.samples import token_keys
from rlk.evidence.verdict import Failure, Side


def oracle(run: Record, step: StepRecord, tally: Tally) -> None:
    """The tokens of the fixed rule were looked at, under the plan's sampling; each lies in the oracle's support and
    has its log-probability on both sides, within the stated error. Native mode is looked at, not judged: its draws have
    no key, its operators no stated error."""
    said = run.oracle(step.step)
    if problem := length_problem(said):
        raise EvidenceError(f"{oracle_file(step.step)}: {problem}")
    samples = step.samples
    pairs = looked_at(step.step, samples.logprobs_by_row(), len(run.plan.config.samplings))
    asked = samples.response_start[[row for row, _ in pairs]] + np.array([index for _, index in pairs])
    tally.add(len(asked))
    if not np.array_equal(token_keys(said.sample_id, said.index), samples.key[asked]):
        where = Failure(where=oracle_file(step.step), step=step.step)
        tally.fail_at(where, "the oracle did not look at the tokens that the rule names")
        return
    scored = step.scored[0]
    found = np.searchsorted(scored.key, samples.key[asked])
    if not np.array_equal(scored.key[np.minimum(found, len(scored.key) - 1)], samples.key[asked]):
        tally.fail_at(Failure(where="train", step=step.step), "a token that the oracle looked at was not scored")
        return
    numbers = np.stack([said.logprob, said.least, said.most, said.scale, said.below, said.through])
    if not np.isfinite(numbers).all():
        tally.fail_at(Failure(where=oracle_file(step.step), step=step.step), "a number of the oracle is not finite")
        return
    if run.plan.config.mode == "native":
        tally.remark(f"step {step.step}: not judged in native mode")
        return
    sides = {
        "rollout": samples.logprobs[asked],
        "policy": scored.logprob[found],
        "update": scored.update_logprob[found],
    }
    first = step.step * run.plan.samples_per_step
    worst = 0.0
    for row, at in enumerate(asked.tolist()):
        sampling = run.plan.sampling_of(int(said.sample_id[row]) - first)
        where = token_place(step.step, "oracle", samples.key[at], samples.tokens[at])
        used = (said.token[row], said.temperature[row], said.top_p[row], said.top_k[row])
        if used != (samples.tokens[at], sampling.temperature, sampling.top_p, sampling.top_k):
            tally.fail_at(where, f"the oracle took another token or sampling than the plan's: {used}")
        elif not _drawn(said, row, step, at, run.plan.config.seed):
            tally.fail_at(where, f"not what the key draws: {said.draw[row]:.6g} lies outside the token's share")
        elif said.reachable[row] != 1:
            tally.fail_at(where, "outside the support that the oracle allows within its error")
        else:
            worst = max(
                worst, *(_compare(said, row, name, values[row], tally, where) for name, values in sides.items())
            )
    tally.remark(f"step {step.step}: the largest deviation is {100 * worst:.0f} % of what is allowed")


def _drawn(said: OracleArrays, row: int, step: StepRecord, at: int, seed: int) -> bool:
    """The number that the key gives falls on the token's share, within the error; a greedy token is not drawn."""
    samples = step.samples
    position = int(samples.prompt_len[samples.row[at]] + samples.index[at])
    draw, heat = uniform(seed, int(said.sample_id[row]), position), float(said.temperature[row])
    if heat == 0:
        return True

    def allowed(share: float) -> float:
        return share_tolerance(float(said.scale[row]), float(said.least[row]), float(said.most[row]), share, heat)

    below, through = float(said.below[row]), float(said.through[row])
    return draw == said.draw[row] and below - allowed(below) <= draw <= through + allowed(through)


def _compare(said: OracleArrays, row: int, name: str, value: np.float32, tally: Tally, where: Failure) -> float:
    """Fails where the value is outside; how far it lies from the oracle's, in units of the tolerance."""
    allowed = tolerance(*(float(column[row]) for column in (said.scale, said.least, said.temperature)))
    low, high = float(said.least[row]) - allowed, float(said.most[row]) + allowed
    inside = bool(np.isfinite(value)) and low <= value <= high
    if not inside:
        sides = (
            Side(source=name, value=str(value), word=hex_word(value)),
            Side(source="oracle", value=repr(float(said.logprob[row]))),
        )
        place = where.model_copy(update={"left": sides[0], "right": sides[1]})
        tally.fail_at(
            place, f"{name} {value}, the oracle says {said.logprob[row]:.6g}, allowed {low:.6g} to {high:.6g}"
        )
        return 0.0
    return max(float(said.least[row] - value), float(value - said.most[row]), 0.0) / allowed
