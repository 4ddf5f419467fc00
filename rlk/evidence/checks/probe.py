"""A probed run: did every rank that computed a row get the same bits from every op?"""

from __future__ import annotations

from rlk.evidence.checks.tally import Tally
from rlk.evidence.errors import EvidenceError
from rlk.evidence.place import Place
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.verdict import Failure, Side


def probe(run: Record, step: StepRecord, tally: Tally) -> None:
    """Rollout, recomputed policy and update have equal fingerprints for every op of every row that two of them have;
    replicas agree, also on gradients and on the optimizer's state; and no predicted token is without its logits."""
    search, seen = step.search
    tally.add(search.rows)
    if search.place is not None:
        tally.fail(f"step {step.step} {search}", _failure(step, search.place), search.wrong)
    if seen < len(step.samples.tokens):
        missing = len(step.samples.tokens) - seen
        place = Failure(where="logits", step=step.step)
        tally.fail_at(place, f"{missing} predicted tokens have no recorded logits on both sides", missing)


def located(run: Record, step: StepRecord) -> str | None:
    """The first op that differs, as a sentence for the message of another check; None where nothing was recorded."""
    if not run.plan.config.probe:
        return None
    try:
        search, _ = step.search
    except EvidenceError as error:
        return f"the probe cannot tell where: {error}"
    if search.place is None:
        return "every recorded op agrees, the log-probability included: the difference came after it was computed"
    return f"first op that differs: {search}"


def _failure(step: StepRecord, place: Place) -> Failure:
    samples = step.samples
    index = None
    rows = [] if place.sample is None else (samples.sample_id == place.sample).nonzero()[0].tolist()
    if rows and place.position is not None:
        # A position predicts the token after it.
        at = place.position + 1 - int(samples.prompt_len[rows[0]])
        index = at if 0 <= at < int(samples.response_len[rows[0]]) else None
    left, right = (Side(source=", ".join(word.sources), value=word.said) for word in (place.odd, place.common))
    shard = "" if place.shard is None else f" shard {place.shard}"
    where = f"{place.op}{shard}" + ("" if place.position is None else f" position {place.position}")
    return Failure(where=where, step=step.step, sample=place.sample, token_index=index, left=left, right=right)
