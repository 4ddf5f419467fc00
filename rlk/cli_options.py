"""Click's options, generated from the configuration: click only splits the words, every judgement is the plan's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from rlk.plan.config import OPTIONS, RunConfig
from rlk.plan.errors import shown
from rlk.plan.options import Option
from rlk.plan.resolve import unknown_option

LENIENT = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Context settings under which an unknown option is left for us, so that it is reported with the other errors."""


def click_options() -> list[click.Parameter]:
    """One click option a flag; the longer names are hidden and named in the help of the short one."""
    return [_click_option(name, option, flag) for name, option in OPTIONS.items() for flag in option.flags]


def said_by(params: Mapping[str, object]) -> list[tuple[str, object]]:
    """The (flag, value) pairs that were given, from click's parameters."""
    pairs: list[tuple[str, object]] = []
    for option in OPTIONS.values():
        for flag in option.flags:
            value = params[_parameter(flag)]
            if option.is_switch:
                pairs += [(flag, True)] if value else []
            elif isinstance(value, tuple):
                pairs += [(flag, text or "") for text in value]  # None is a flag without its value
    return pairs


def words_of(pairs: Sequence[tuple[str, object]]) -> list[str]:
    """The command-line words that say these pairs."""
    return [word for flag, value in pairs for word in ((flag,) if value is True else (flag, str(value)))]


def leftovers(words: Sequence[str]) -> list[str]:
    """An error line for each word that belongs to no option; the value of an unknown option is part of its line."""
    lines: list[str] = []
    follows_unknown = False
    for word in words:
        if word.startswith("-") and word != "-":
            lines.append(unknown_option(word.partition("=")[0]))
            follows_unknown = "=" not in word
        elif follows_unknown:
            follows_unknown = False
        else:
            lines.append(f"{shown(word)}: no argument is expected here: every setting is an option, see --help")
    return lines


def _parameter(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _click_option(name: str, option: Option, flag: str) -> click.Option:
    return click.Option(
        [flag, _parameter(flag)],
        is_flag=option.is_switch,
        multiple=not option.is_switch,
        metavar=None if option.is_switch else "VALUE",
        hidden=flag != option.flag,
        help=_help(name, option),
    )


def _help(name: str, option: Option) -> str:
    default = RunConfig.model_fields[name].default
    facts = [] if option.is_switch else [option.domain.allowed]
    if not option.is_switch and default is not None:
        run = "" if option.run_default is None else f", {option.domain.text(option.run_default)} for run"
        facts.append(f"default {option.domain.text(default)}{run}")
    facts += [option.variable, *option.flags[1:]]
    return f"{option.help} [{'; '.join(facts)}]"
