"""Arguments in, exit code out: 0 a pass, 1 a failed run or validation, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from rlk.cli_compare import comparison
from rlk.cli_detach import launch
from rlk.cli_options import LENIENT, click_options, leftovers, said_by
from rlk.cli_output import Report, print_errors, print_plan, print_report, stdout_to_stderr
from rlk.cli_python import go_on
from rlk.plan.config import OPTIONS
from rlk.plan.derive import Plan
from rlk.plan.errors import ConfigErrors, shown
from rlk.plan.load import load_plan
from rlk.plan.naming import new_run_id
from rlk.plan.resolve import Command, setting_of

PASSED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
RUN_FILES = ("manifest.json", "plan.json")
"""A directory with either is a run directory; one that lost the other is a red run, not wrong usage."""

Said = Sequence[tuple[str, object]]
Action = Callable[[Said, Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; whatever happens is said in single lines, never a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = OPTIONS["as_json"].flag in words or _truthy(setting_of("as_json", (), os.environ))
    try:
        return int(_COMMANDS.main(args=words, prog_name="rlk", standalone_mode=False) or PASSED)
    except ConfigErrors as error:
        print_errors(error.errors, as_json)
        return USAGE
    except click.ClickException as error:
        print_errors([error.format_message()], as_json)
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        print_errors(["interrupted"], as_json)
        return INTERRUPTED
    except Exception as error:  # the outermost frame: nothing is left to handle it, and it must be one line
        print_errors([_line_of(error)], as_json)
        return FAILED


def _plan(said: Said, words: Sequence[str]) -> int:
    command: Command = "verify"
    if words and words[0] in ("verify", "run"):
        command, words = ("run" if words[0] == "run" else "verify"), words[1:]
    plan = _load(command, said, words)
    if plan.config.as_json:
        click.echo(plan.to_json())
    else:
        print_plan(plan)
    return PASSED


def _verify(said: Said, words: Sequence[str]) -> int:
    return _run_plan(_load("verify", said, words), said)


def _run(said: Said, words: Sequence[str]) -> int:
    return _run_plan(_load("run", said, words), said)


def _load(command: Command, said: Said, words: Sequence[str]) -> Plan:
    """The plan, or ConfigErrors with the words that are no option and every other fault together."""
    unknown = leftovers(words)
    try:
        plan = load_plan(command, said, os.environ, Path.cwd())
    except ConfigErrors as error:
        raise ConfigErrors((*unknown, *error.errors)) from error
    if unknown:
        raise ConfigErrors(unknown)
    return plan


def _run_plan(plan: Plan, said: Said) -> int:
    if plan.unbuilt:
        raise ConfigErrors(plan.unbuilt)
    go_on(plan.profile, plan.config, said, os.environ)
    if plan.config.run_id is None:
        plan = plan.with_run_id(new_run_id(plan.cell, datetime.now(), secrets.token_hex(2)))
    run_dir = Path(plan.config.output_root) / plan.run_id
    if run_dir.exists():
        raise ConfigErrors([f"--run-id {plan.run_id}: {run_dir} exists: allowed is a name that no run has had"])
    if plan.config.ray_address is not None:
        return _submit(plan)
    from rlk.driver.refusals import refuse

    refuse(plan, os.environ)
    if plan.config.detach:
        launch(plan, said, os.environ)
        return PASSED
    from rlk.driver.run import execute  # brings torch and Ray, which the other commands must not need

    as_json, verify = plan.config.as_json, plan.config.command == "verify"
    with stdout_to_stderr() if as_json else contextlib.nullcontext():
        outcome = execute(plan, verify=verify, out=sys.stderr if as_json else sys.stdout)
    print_report(_report(outcome, outcome.run_dir, outcome.seconds), as_json)
    return PASSED if outcome.passed else FAILED


def _submit(plan: Plan) -> int:
    from rlk.cli_submit import submit  # brings Ray

    with stdout_to_stderr() if plan.config.as_json else contextlib.nullcontext():
        report = submit(plan, os.environ, wait=not plan.config.detach)
    if report is None:
        return PASSED
    print_report(report, plan.config.as_json)
    return PASSED if report.passed else FAILED


def _job(record: str) -> int:
    from rlk.cli_job import run_job

    report = run_job(Path(record))
    print_report(report, as_json=False)
    return PASSED if report.passed else FAILED


def _validate(run_dir: str, as_json: bool) -> int:
    folder = _run_folder(run_dir)
    from rlk.evidence.validate import validate

    started = time.monotonic()
    result = validate(folder)
    for check in () if as_json else result.checks:
        click.echo(f"{'ok ' if check.passed else 'RED'}  {check.name}: {check.message}")
    print_report(_report(result, str(folder), time.monotonic() - started), as_json)
    return PASSED if result.passed else FAILED


def _compare(run_dirs: Sequence[str], as_json: bool) -> int:
    folders = [_run_folder(name) for name in run_dirs]
    if len(folders) < 2:
        raise ConfigErrors([f"RUN_DIR {shown(run_dirs[0])}: a comparison needs two run directories or more"])
    return PASSED if comparison(folders, as_json) else FAILED


def _run_folder(name: str) -> Path:
    folder = Path(name)
    if not any((folder / file).is_file() for file in RUN_FILES):
        raise ConfigErrors([f"RUN_DIR {shown(name)}: allowed is a run directory: it holds {' and '.join(RUN_FILES)}"])
    return folder


def _report(result: Any, run_dir: str, seconds: float) -> Report:
    """The report of an `Outcome` or of a `Validation`: of what the two have in common."""
    return Report(
        passed=result.passed,
        run_dir=run_dir,
        steps=result.steps,
        tokens_compared=result.tokens_compared,
        mismatching_tokens=result.mismatching_tokens,
        digest=result.digest,
        seconds=seconds,
        errors=tuple(result.errors),
    )


def _configured(name: str, action: Action, help: str) -> click.Command:
    @click.pass_context
    def callback(context: click.Context, /, **params: object) -> int:
        return action(said_by(params), context.args)

    return click.Command(name, params=click_options(), callback=callback, help=help, context_settings=dict(LENIENT))


_COMMANDS = click.Group(
    "rlk",
    help="Proves in bytes that RL training and vLLM rollout compute the same log-probabilities.",
    commands=[
        _configured(
            "plan",
            _plan,
            "Show what `rlk verify` (or with the word run, `rlk run`) would do with the same options. Starts nothing: "
            "--detach and --run-id only show in the command.",
        ),
        _configured("verify", _verify, "Run a few training steps and judge them, weight updates included."),
        _configured("run", _run, "Run training steps and judge their log-probabilities and coverage."),
        click.Command(
            "validate",
            params=[
                click.Argument(["run_dir"], metavar="RUN_DIR"),
                click.Option(["--json", "as_json"], is_flag=True, help=OPTIONS["as_json"].help),
            ],
            callback=_validate,
            help="Judge a run directory by its files alone, on any machine.",
        ),
        click.Command(
            "job",
            params=[click.Argument(["record"], metavar="RECORD")],
            callback=_job,
            hidden=True,  # Ray calls it, as the entry point of a submission
            help="Run what `--ray-address` submitted, as a job of that cluster.",
        ),
        click.Command(
            "compare",
            params=[
                click.Argument(["run_dirs"], metavar="RUN_DIR...", nargs=-1, required=True),
                click.Option(["--json", "as_json"], is_flag=True, help=OPTIONS["as_json"].help),
            ],
            callback=_compare,
            help="Compare the first run directory with the others: equal, or the first step and field that differ.",
        ),
    ],
)


def _truthy(text: str | None) -> bool:
    return text is not None and text.lower() in ("1", "true", "yes")


def _line_of(error: Exception) -> str:
    """What went wrong inside, in one line, with the file that holds the traceback."""
    with tempfile.NamedTemporaryFile("w", prefix="rlk-crash-", suffix=".log", delete=False) as stream:
        traceback.print_exception(error, file=stream)
    return f"internal error: {type(error).__name__}: {' '.join(str(error).split())}: traceback in {stream.name}"
