"""Precedence: command line, then RLK_* environment, then profile, then default. All errors are found at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from rlk.plan.config import OPTIONS, RunConfig
from rlk.plan.errors import ConfigErrors, shown
from rlk.plan.profile import Profile
from rlk.plan.rules import Case, check
from rlk.plan.shape import ModelShape

Command = Literal["verify", "run"]
Said = Mapping[str, object] | Iterable[tuple[str, object]]

INTERNAL_VARIABLES = frozenset(
    {"RLK_PLATFORM", "RLK_TEST_OUTPUT", "RLK_PROOFS", "RLK_GEMM", "RLK_TREE", "RLK_ATTENTION"}
)
"""RLK_ variables that are no options: set by a run for the processes that it starts, or the names of kernel choices
(rlk.kernels.cuda.choice), which those processes read and record."""

Layer = Literal["command line", "cell", "environment", "profile"]
_RANK: dict[Layer, int] = {"command line": 0, "cell": 0, "environment": 1, "profile": 2}
_SAMPLER = ("temperature", "top_p", "top_k")
_FLAGS = {flag: name for name, option in OPTIONS.items() for flag in option.flags}
_VARIABLES = {option.variable: name for name, option in OPTIONS.items()}


@dataclass(frozen=True)
class Setting:
    """One value before it is parsed, the layer that it came from, and how an error line names it."""

    value: object
    source: Layer
    said: str


def resolve(
    cli: Said,
    env: Mapping[str, str],
    profile: Profile | None,
    shape: ModelShape | None = None,
    *,
    command: Command = "verify",
    first: Literal["command line", "cell"] = "command line",
) -> RunConfig:
    """The configuration that these layers ask for, or ConfigErrors with every fault of all of them.

    `cli` holds values (text or typed) by field name or by any flag of the field; `first` names that layer. Rules
    between fields, which need the profile and the model's shape, are checked where both are given; `derive` checks
    them in any case.
    """
    errors: list[str] = []
    settings = _choose((*_layers(cli, env, profile, errors, first),))
    _choose_sampler(settings, errors)
    config, wrong = _build(settings, command, errors)
    if profile is not None and shape is not None:
        errors += check(Case(config, profile, shape, {n: s.said for n, s in settings.items()}), skip=wrong)
    if errors:
        raise ConfigErrors(errors)
    return config


def setting_of(name: str, cli: Said, env: Mapping[str, str]) -> str | None:
    """What command line or environment say about one field, unparsed: for the options that precede the profile."""
    chosen = _choose((*_layers(cli, env, None, []),))
    return str(chosen[name].value) if name in chosen else None


def _layers(
    cli: Said, env: Mapping[str, str], profile: Profile | None, errors: list[str], first: Layer = "command line"
) -> Iterable[dict[str, Setting]]:
    yield _first(cli, errors, first)
    yield _environment(env, errors)
    yield _profile(profile, errors)


def _first(cli: Said, errors: list[str], source: Layer) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for key, value in cli.items() if isinstance(cli, Mapping) else cli:
        name = _FLAGS.get(key, key)
        if name not in OPTIONS:
            errors.append(unknown_option(key))
            continue
        flag = key if key in _FLAGS else OPTIONS[name].flag
        said = flag if OPTIONS[name].is_switch and value is True else f"{flag} {_text(name, value)}"
        if name in found and found[name].value != value:
            errors.append(f"{said}: already given as {found[name].said}: say it once")
        found.setdefault(name, Setting(value, source, said))
    return found


def _environment(env: Mapping[str, str], errors: list[str]) -> dict[str, Setting]:
    found = {}
    for variable in sorted(env):
        if not variable.startswith("RLK_") or variable in INTERNAL_VARIABLES or env[variable] == "":
            continue
        if variable not in _VARIABLES:
            errors.append(f"{variable}={shown(env[variable])}: no such option{_near(variable, _VARIABLES)}")
            continue
        said = f"{variable}={shown(env[variable])}"
        found[_VARIABLES[variable]] = Setting(env[variable], "environment", said)
    return found


def _profile(profile: Profile | None, errors: list[str]) -> dict[str, Setting]:
    found = {}
    for name, value in profile.defaults.items() if profile else ():
        place = f"profile {profile.origin if profile else ''}: defaults.{shown(name)}"
        if name not in OPTIONS or not OPTIONS[name].in_profile:
            usable = [known for known, option in OPTIONS.items() if option.in_profile]
            errors.append(f"{place}: no default may be given for it{_near(name, usable)}")
            continue
        found[name] = Setting(value, "profile", f"{place} {_text(name, value)}")
    return found


def _choose(layers: Iterable[Mapping[str, Setting]]) -> dict[str, Setting]:
    """Per field the strongest layer that says something."""
    chosen: dict[str, Setting] = {}
    for layer in layers:
        for name, setting in layer.items():
            chosen.setdefault(name, setting)
    return chosen


def _choose_sampler(settings: dict[str, Setting], errors: list[str]) -> None:
    """A mix and a single sampling exclude each other: the stronger layer wins, and one layer may not say both."""
    mix = settings.get("mix")
    for name in _SAMPLER:
        single = settings.get(name)
        if mix is None or single is None:
            continue
        if _RANK[single.source] == _RANK[mix.source]:
            errors.append(f"{single.said}: allowed is either this or {mix.said}, not both")
        elif _RANK[single.source] < _RANK[mix.source]:
            settings.pop("mix", None)
        else:
            del settings[name]


def _build(settings: Mapping[str, Setting], command: Command, errors: list[str]) -> tuple[RunConfig, set[str]]:
    """The config; wrong fields are reported, named in the set, and have their default, so that others can be judged."""
    values: dict[str, Any] = {name: setting.value for name, setting in settings.items()}
    sources = {name: str(settings[name].source) for name in OPTIONS if name in settings}
    if command == "run":
        for name, option in OPTIONS.items():
            if option.run_default is not None:
                values.setdefault(name, option.run_default)
    try:
        return RunConfig(command=command, sources=sources, **values), set()
    except ValidationError as error:
        wrong = {str(fault["loc"][0]) for fault in error.errors(include_url=False)}
    for name in (name for name in OPTIONS if name in wrong):
        errors.append(f"{settings[name].said}: allowed is {OPTIONS[name].domain.allowed}")
    right = {name: value for name, value in values.items() if name not in wrong}
    return RunConfig(command=command, sources=sources, **right), wrong


def unknown_option(flag: str) -> str:
    """The error line for a flag that no option has."""
    return f"{shown(flag)}: no such option{_near(flag, _FLAGS)}"


def _near(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, sorted(known), n=1)
    return f": did you mean {match[0]}?" if match else ": see --help"


def _text(name: str, value: object) -> str:
    """The value as the line that sets it would say it, also where it is not one of the domain."""
    if isinstance(value, str) or value is None:
        return shown(value)
    try:
        return OPTIONS[name].domain.text(value)
    except ValueError:
        return shown(value)
