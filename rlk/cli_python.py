"""The profile's Python and checkout: the command goes on under them, so that driver and actors are of one kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlk.cli_options import words_of
from rlk.plan.config import RunConfig
from rlk.plan.errors import ConfigErrors
from rlk.plan.profile import Profile

CHECKOUT = Path(__file__).parents[1]


def go_on(profile: Profile, config: RunConfig, said: Sequence[tuple[str, object]], env: Mapping[str, str]) -> None:
    """Replaces this process by one of the profile's interpreter and checkout; returns where they are those already.

    Raises:
        ConfigErrors: the profile's checkout holds no rlk.
    """
    python, framework = Path(profile.python or sys.executable), Path(profile.framework or CHECKOUT)
    if _same_python(python) and framework.resolve() == CHECKOUT.resolve():
        return
    if not (framework / "rlk" / "__main__.py").is_file():
        raise ConfigErrors([f"profile {profile.origin}: framework {framework}: allowed is a checkout of rlk"])
    path = os.pathsep.join(filter(None, (str(framework), env.get("PYTHONPATH"))))
    words = [str(python), "-P", "-m", "rlk", config.command, *words_of(said)]
    os.execve(python, words, {**env, "PYTHONPATH": path})


def _same_python(python: Path) -> bool:
    """One folder and one program behind the link: the folder of a link decides which packages it sees."""
    here = Path(sys.executable)
    return (python.parent.resolve(), python.resolve()) == (here.parent.resolve(), here.resolve())
