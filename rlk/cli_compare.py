"""`rlk compare`: the first run against each other one, from their directories alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlk.evidence.compare import Comparison


def comparison(folders: Sequence[Path], as_json: bool) -> bool:
    """Compares, prints, and returns whether all runs are equal; a run that cannot be read equals none."""
    from rlk.evidence.compare import compare  # brings numpy, which the other commands need not wait for
    from rlk.evidence.errors import EvidenceError

    objects = []
    for other in folders[1:]:
        try:
            one = compare(folders[0], other)
        except EvidenceError as error:
            objects.append({"equal": False, "left": str(folders[0]), "right": str(other), "error": str(error)})
            if not as_json:
                click.echo(f"{_word(False)}  {folders[0]} and {other} cannot be compared: {error}")
            continue
        objects.append({"equal": one.equal, **dataclasses.asdict(one), "error": None})
        if not as_json:
            _print(one)
    equal = all(one["equal"] for one in objects)
    if as_json:
        click.echo(json.dumps({"equal": equal, "comparisons": objects}))
    return equal


def _word(equal: bool) -> str:
    return click.style("EQUAL", fg="green", bold=True) if equal else click.style("DIFFER", fg="red", bold=True)


def _print(one: Comparison) -> None:
    click.echo(f"{_word(one.equal)}  {one.left} and {one.right}: {one.steps} steps looked at")
    if one.first is not None:
        click.echo(f"  first field: {one.first}")
    if one.op is not None:
        click.echo(f"  first op: {one.op}")
    if one.settings:
        click.echo(f"  settings that differ: {', '.join(one.settings)}")
