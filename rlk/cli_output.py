"""What the commands print: verdicts, checks and plans, as text or as one JSON object."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from rlk.plan.derive import Plan
from rlk.plan.describe import describe


@dataclass(frozen=True)
class Report:
    """What a run, a validation or a refusal comes to: its fields are those of the `--json` object."""

    passed: bool = False
    run_dir: str | None = None
    steps: int = 0
    tokens_compared: int = 0
    mismatching_tokens: int = 0
    digest: str | None = None
    """SHA-256 of the trajectory after the last step."""
    seconds: float = 0.0
    errors: tuple[str, ...] = ()


def print_plan(plan: Plan) -> None:
    """Every section of the plan that has a line."""
    for title, lines in describe(plan):
        if lines:
            click.secho(title, bold=True)
        width = max((len(name) for name, _ in lines), default=0)
        for name, text in lines:
            click.echo(f"  {name:<{width}}  {text}" if name else f"  {text}")


def print_report(report: Report, as_json: bool) -> None:
    """The object, or the errors, the verdict in one line and where its evidence lies."""
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
        return
    for line in report.errors:
        click.echo(line)
    word = click.style("PASS", fg="green", bold=True) if report.passed else click.style("FAIL", fg="red", bold=True)
    click.echo(
        f"{word}  {report.steps} steps, {report.tokens_compared} tokens compared, "
        f"{report.mismatching_tokens} mismatching, digest {report.digest}, {report.seconds:.1f} s"
    )
    click.echo(f"run directory {report.run_dir}")


def print_errors(errors: Sequence[str], as_json: bool) -> None:
    """One line an error on standard error; with `--json` also the object of a run that compared nothing."""
    for line in errors:
        click.echo(line, err=True)
    if as_json:
        print_report(Report(errors=tuple(errors)), as_json)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends standard output to standard error meanwhile, also what compiled code and child processes write to it."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # What was written to C's buffer meanwhile would otherwise come out later, beside the JSON object.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
