"""`--ray-address`: submits a run to the Ray that is there, follows it, and judges how it ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click
import psutil

from rlk.cli_output import Report
from rlk.driver.jobs import Jobs
from rlk.driver.processes import interruptible
from rlk.driver.provenance import ROOT
from rlk.driver.refusals import refuse
from rlk.driver.submission import Submission
from rlk.evidence import layout
from rlk.evidence.validate import validate
from rlk.plan.derive import Plan, derive
from rlk.plan.errors import ConfigErrors
from rlk.plan.placement import entrypoint, record_path, submission_id

STOP_MARGIN_S = 30


def submit(plan: Plan, env: Mapping[str, str], *, wait: bool) -> Report | None:
    """Submits the run, waits for its end unless told otherwise, and judges it by its files and by the job's own end.

    Raises:
        ConfigErrors: it was refused; then nothing was created.
    """
    start = time.monotonic()
    plan = _as_submitted(plan)
    refuse(plan, env, gpus=False)
    jobs = Jobs(str(plan.config.ray_address))
    node, placed = jobs.node(plan)
    if placed.gpus == node.gpus and node.ip in _addresses():  # else the job asks for those that Ray gives it
        refuse(plan, env)
    name, record = submission_id(plan.run_id), record_path(Path(plan.config.output_root), plan.run_id)
    _write(record, Submission.of(plan, name, jobs.address, tuple(sys.argv)))
    command = entrypoint(plan.profile.python or sys.executable, record)
    try:
        jobs.submit(name, command, node, _environment(plan, env))
    except ConfigErrors:
        record.unlink()
        raise
    run_dir = Path(plan.config.output_root) / plan.run_id
    click.echo(f"submission  {name} on node {node.ip}")
    if not wait:
        click.echo(f"follow      ray job logs --follow --address {jobs.address} {name}")
        click.echo(f"verdict     rlk validate {run_dir}")
        return None
    with interruptible():
        status, message = _followed(jobs, name, plan)
    return judged(name, status, message, run_dir, time.monotonic() - start)


def _as_submitted(plan: Plan) -> Plan:
    """The plan of the job: it waits for nothing, and its paths hold wherever it starts."""
    root = str(Path(plan.config.output_root).absolute())
    config = plan.config.model_copy(update={"output_root": root, "detach": False, "as_json": False})
    return derive(config, plan.profile, plan.shape)


def _addresses() -> set[str]:
    return {address.address for entries in psutil.net_if_addrs().values() for address in entries}


def _write(record: Path, submission: Submission) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("x", encoding="utf-8") as stream:
            stream.write(submission.to_json(indent=2) + "\n")
    except OSError as error:
        raise ConfigErrors([f"{record}: {error.strerror}: give another --run-id or --output-root"]) from error


def _environment(plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """Variables of the job: the checkout that it runs, and time to seal its evidence when it is stopped."""
    path = os.pathsep.join(filter(None, (plan.profile.framework or str(ROOT), env.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "RAY_JOB_STOP_WAIT_TIME_S": str(_stop_s(plan))}


def _stop_s(plan: Plan) -> int:
    return 2 * plan.profile.timeouts.stop_s + STOP_MARGIN_S


def _followed(jobs: Jobs, name: str, plan: Plan) -> tuple[str, str]:
    """The job's terminal state and message; its log meanwhile. An interrupt stops the job, waits for it and goes on."""
    try:
        jobs.follow(name, sys.stdout)
        status, message = jobs.end(name)
        click.echo(f"job {name} {status}")
        return status, message
    except KeyboardInterrupt:
        click.echo(f"stopping job {name}", err=True)
        jobs.stop(name)
        jobs.end(name, _stop_s(plan) + STOP_MARGIN_S)
        raise


def judged(name: str, status: str, message: str, run_dir: Path, seconds: float) -> Report:
    """The report of a job that ended: green only where it SUCCEEDED and its sealed evidence passes here as well."""
    errors = [] if status == "SUCCEEDED" else [f"job {name} {status}: {message or 'Ray says no more'}"]
    if not (run_dir / layout.SUMS).is_file():
        errors.append(
            f"{run_dir}: no sealed verdict: the job ended without one, or wrote it where this host sees nothing"
        )
        return Report(run_dir=str(run_dir), seconds=seconds, errors=tuple(errors))
    verdict = validate(run_dir)
    return Report(
        passed=verdict.passed and status == "SUCCEEDED",
        run_dir=str(run_dir),
        steps=verdict.steps,
        tokens_compared=verdict.tokens_compared,
        mismatching_tokens=verdict.mismatching_tokens,
        digest=verdict.digest,
        seconds=seconds,
        errors=(*errors, *verdict.errors),
    )
