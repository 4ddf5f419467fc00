"""`--detach`: the same command again, in a session of its own, with its words in a log file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from rlk.cli_options import words_of
from rlk.plan.config import OPTIONS
from rlk.plan.derive import Plan
from rlk.plan.errors import ConfigErrors

_REPLACED = ("detach", "run_id")


def launch(plan: Plan, said: Sequence[tuple[str, object]], env: Mapping[str, str]) -> None:
    """Starts the command in the background under the plan's run id, and prints how to follow it. Does not wait."""
    root = Path(plan.config.output_root)
    log = root / f"{plan.run_id}.launch.log"
    command = detached_command(plan, said)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with log.open("xb") as stream:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=detached_environment(env),
            )
    except OSError as error:
        raise ConfigErrors([f"--detach: {log}: {error.strerror}: give another --run-id or --output-root"]) from error
    # It outlives this process on purpose, so there is nobody to wait for it here.
    child.returncode = 0
    click.echo(f"run id   {plan.run_id}")
    click.echo(f"process  {child.pid}")
    click.echo(f"follow   tail -f {log}")
    click.echo(f"verdict  rlk validate {root / plan.run_id}")


def detached_command(plan: Plan, said: Sequence[tuple[str, object]]) -> list[str]:
    """The words of the background process: those of this one, without --detach and with the run id."""
    replaced = {flag for name in _REPLACED for flag in OPTIONS[name].flags}
    words = words_of([(flag, value) for flag, value in said if flag not in replaced])
    return [sys.executable, "-m", "rlk", plan.config.command, *words, OPTIONS["run_id"].flag, plan.run_id]


def detached_environment(env: Mapping[str, str]) -> dict[str, str]:
    """This environment without the variables that would detach or name the run again."""
    replaced = {OPTIONS[name].variable for name in _REPLACED}
    kept = {name: value for name, value in env.items() if name not in replaced}
    return {**kept, "PYTHONUNBUFFERED": "1"}  # so that the log can be followed
