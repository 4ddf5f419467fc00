"""The one door from what a user typed to a plan: reads the profile and the model, and reports every error at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlk.plan.derive import Plan, derive
from rlk.plan.errors import ConfigErrors
from rlk.plan.profile import Profile, load_profile
from rlk.plan.resolve import Command, Said, resolve, setting_of
from rlk.plan.shape import ModelShape, read_shape


def load_plan(command: Command, cli: Said, env: Mapping[str, str], cwd: Path) -> Plan:
    """The plan of `rlk COMMAND` with these options, in this environment and folder.

    Raises ConfigErrors with the faults of the profile, the model and the options together.
    """
    said = tuple(cli.items() if isinstance(cli, Mapping) else cli)
    errors: list[str] = []
    profile: Profile | None = None
    shape: ModelShape | None = None
    try:
        profile = load_profile(setting_of("profile", said, env), cwd)
        shape = read_shape(profile.model)
    except ConfigErrors as error:
        errors += error.errors
    try:
        config = resolve(said, env, profile, shape, command=command)
    except ConfigErrors as error:
        raise ConfigErrors((*errors, *error.errors)) from error
    if profile is None or shape is None:
        raise ConfigErrors(errors)
    return derive(config, profile, shape)
