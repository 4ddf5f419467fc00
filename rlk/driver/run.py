"""From a plan to a verdict: the run directory, the session, the steps, and what remains when any of them fails."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from rlk.driver.cluster import Cluster
from rlk.driver.errors import RunError
from rlk.driver.manifest import ManifestMaker
from rlk.driver.processes import interruptible
from rlk.driver.progress import LiveView, Watch
from rlk.driver.record_faults import apply, reported
from rlk.driver.session import Session
from rlk.driver.submission import Submission
from rlk.evidence.verdict import Validation
from rlk.evidence.writer import RunWriter
from rlk.plan.derive import Plan
from rlk.plan.faults import injection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `digest` is that of the trajectory; `errors` holds one line for each thing that is wrong."""

    passed: bool
    run_dir: str
    steps: int
    tokens_compared: int
    mismatching_tokens: int
    digest: str | None
    seconds: float
    errors: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """Where a submitted run is: the cluster that it joined, and the record of its submission."""

    cluster: Cluster
    submission: Submission

    @property
    def runtime(self) -> dict[str, str]:
        """What it adds to the manifest's paths."""
        return {"ray_address": self.submission.ray_address, "submission_id": self.submission.submission_id}


def execute(plan: Plan, *, verify: bool, out: TextIO, job: Job | None = None) -> Outcome:
    """One run in a session of its own, on a Ray of its own unless it is a job of another. `out` shows progress.

    A run that fails half way leaves a sealed directory with a red verdict; so does one that is interrupted.
    """
    if verify != (plan.config.command == "verify"):
        raise ValueError(f"the plan was made for {plan.config.command}")
    with LiveView(out, plan.config.steps) as watch, interruptible():
        session = Session(plan, job.cluster if job else None)
        return _record(plan, session, watch, own=True, job=job)


def execute_in(session: Session, plan: Plan, watch: Watch) -> Outcome:
    """One run in a session that goes on afterwards: it is reset to the initial state first."""
    session.reset(plan)
    return _record(plan, session, watch, own=False)


def _record(plan: Plan, session: Session, watch: Watch, *, own: bool, job: Job | None = None) -> Outcome:
    start = time.monotonic()
    writer = RunWriter.create(Path(plan.config.output_root), plan.run_id)
    arguments, runtime = (job.submission.arguments, job.runtime) if job else (tuple(sys.argv), {})
    maker = ManifestMaker(plan, arguments, writer.run_dir, runtime)
    writer.manifest(maker.make("running"))
    writer.plan(plan)
    error, interrupt = None, None
    with _log_to(writer.log):
        try:
            if own:
                session.start(watch)
            finished = replace(maker, said=session.run(writer, watch))
            finished.told()  # what a process said and the manifest refuses fails the run, which is sealed too
            maker = finished
        except KeyboardInterrupt as stopped:
            error, interrupt = "interrupted", stopped
        except Exception as failure:
            log.exception("the run failed")
            error = str(failure) if isinstance(failure, RunError) else f"{type(failure).__name__}: {failure}"
        if own:
            watch.phase(None, "ending all processes")
            error = _stop(session, error)
        status = session.status(error)
    manifest = maker.make(
        "failed" if error else "complete", error, session.cluster.ledger.owned, outlive=not own and error is None
    )
    if plan.config.inject and injection(plan.config.inject).fault.acts == "record" and error is None:
        apply(writer.run_dir, injection(plan.config.inject))
        status = reported(status, injection(plan.config.inject))
    verdict = writer.finish(manifest, status)
    if interrupt is not None:
        raise interrupt
    return Outcome(
        passed=verdict.passed,
        run_dir=str(writer.run_dir),
        steps=verdict.steps,
        tokens_compared=verdict.tokens_compared,
        mismatching_tokens=verdict.mismatching_tokens,
        digest=verdict.digest,
        seconds=round(time.monotonic() - start, 3),
        errors=(error, _unmade(verdict)) if error else verdict.errors,
    )


def _unmade(verdict: Validation) -> str:
    """One line for the many checks that are red because a failed run has no more evidence."""
    red = sum(not check.passed for check in verdict.checks)
    return f"{red} of {len(verdict.checks)} checks are red, since the evidence ends there: rlk validate lists them"


def _stop(session: Session, error: str | None) -> str | None:
    try:
        session.stop()
    except RunError as failure:
        log.exception("the session did not end well")
        return error or str(failure)
    return error


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Sends the package's log to a file meanwhile."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("rlk")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
