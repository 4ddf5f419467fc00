"""The one error of this floor: settings that cannot be used, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigErrors(ValueError):  # noqa: N818 - the plural is the point: it holds them all
    """Every reason why the given settings make no plan; each is one line: what was said, what is allowed."""

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors: tuple[str, ...] = tuple(errors)
        super().__init__("\n".join(self.errors))


def shown(value: object) -> str:
    """The value as an error line shows it: bare where that is unambiguous, else quoted and escaped."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    text = str(value)
    plain = text.isprintable() and text != "" and " " not in text
    return text if plain and len(text) <= 200 else repr(text[:200])
