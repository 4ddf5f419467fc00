"""Faults of the record: what a run directory could hold although the run did not do it. See rlk.plan.faults.

Each takes a directory that has no verdict and no seal yet, so that what is red is the check that must see it and not
the seal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlk.evidence import layout
from rlk.evidence.arrays import RolloutArrays
from rlk.evidence.ray_status import RayStatus
from rlk.evidence.record import Record
from rlk.evidence.schemas import Metrics
from rlk.plan.faults import Injection

JOB_FAILED = "job-failed"


def apply(run_dir: Path, injection: Injection) -> None:
    """Puts the fault into the record: in its step, else in the last one."""
    if injection.fault.name == JOB_FAILED:
        return
    run = Record(run_dir)
    step = run.plan.config.steps - 1 if injection.step is None else injection.step
    _FAULTS[injection.fault.name](run, step)


def reported(status: RayStatus, injection: Injection) -> RayStatus:
    """What is written of the Ray job, which is the last file of a run."""
    return replace(status, outcome="FAILED") if injection.fault.name == JOB_FAILED else status


def _logprobs_reused(run: Record, step: int) -> None:
    _metrics(run, [m.model_copy(update={"rollout_logprobs_reused": m.step == step}) for m in run.metrics])


def _step_skipped(run: Record, step: int) -> None:
    _metrics(run, [m for m in run.metrics if m.step != step])


def _step_doubled(run: Record, step: int) -> None:
    _metrics(run, [m for m in run.metrics for _ in range(2 if m.step == step else 1)])


def _sample_dropped(run: Record, step: int) -> None:
    arrays = run.step(step).rollouts[0]
    lengths = {"prompt_tokens": arrays.prompt_len, "tokens": arrays.response_len}
    lengths |= dict.fromkeys(("mask", "logprobs"), arrays.response_len)
    kept = np.arange(len(arrays.sample_id)) > 0
    columns = {
        name: column[np.repeat(kept, lengths[name]) if name in lengths else kept]
        for name, column in arrays.columns().items()
    }
    _rollout(run, step, RolloutArrays(**columns))


def _logprob_padded(run: Record, step: int) -> None:
    arrays = run.step(step).rollouts[0]
    logprobs = arrays.logprobs.copy()
    at = int(logprobs.argmin())  # of the token where a zero is surely wrong
    logprobs[at] = 0.0
    _rollout(run, step, replace(arrays, logprobs=logprobs))


def _nan_everywhere(run: Record, step: int) -> None:
    found = run.step(step)
    key = found.samples.key[0]
    for engine, arrays in enumerate(found.rollouts):
        if found.samples.engine[0] == engine:
            starts = np.cumsum(arrays.response_len) - arrays.response_len
            row = int(np.flatnonzero(arrays.sample_id == found.samples.sample_id[0])[0])
            logprobs = arrays.logprobs.copy()
            logprobs[starts[row]] = np.nan
            _rollout(run, step, replace(arrays, logprobs=logprobs), engine)
    for rank, scored in enumerate(found.trains):
        here = (scored.sample_id << 24) + scored.index == key
        values = {n: np.where(here, np.float32(np.nan), getattr(scored, n)) for n in ("logprob", "update_logprob")}
        cp = run.plan.train.cp
        place = {"step": step, "rank": rank, "tp_rank": rank // cp, "cp_rank": rank % cp}
        (run.run_dir / layout.train_file(step, rank)).write_bytes(replace(scored, **values).to_bytes(place))


def _metrics(run: Record, lines: list[Metrics]) -> None:
    (run.run_dir / layout.METRICS).write_text("".join(f"{line.to_json()}\n" for line in lines))


def _rollout(run: Record, step: int, arrays: RolloutArrays, engine: int = 0) -> None:
    path = run.run_dir / layout.rollout_file(step, engine)
    path.write_bytes(arrays.to_bytes({"step": step, "engine": engine}))


_FAULTS: dict[str, Callable[[Record, int], None]] = {
    "logprobs-reused": _logprobs_reused,
    "sample-dropped": _sample_dropped,
    "logprob-padded": _logprob_padded,
    "nan-everywhere": _nan_everywhere,
    "step-skipped": _step_skipped,
    "step-doubled": _step_doubled,
}
