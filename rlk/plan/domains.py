"""Sets of values an option may take: each parses what was said, and says in words what is allowed."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rlk.plan.errors import shown


class Domain(Protocol):
    """What an option needs of its set of values."""

    @property
    def allowed(self) -> str:
        """The set in words; it follows "allowed is" in an error line."""

    def parse(self, value: object) -> object:
        """The value of this set that `value` (text, or already typed) says; raises ValueError outside of it."""

    def text(self, value: object) -> str:
        """The text that `parse` reads back as the same value."""


@dataclass(frozen=True)
class _Worded:
    allowed: str

    def text(self, value: object) -> str:
        return shown(value)

    def refuse(self, value: object) -> ValueError:
        return ValueError(f"{shown(value)}: allowed is {self.allowed}")


@dataclass(frozen=True)
class Whole(_Worded):
    """Whole numbers from `low` to `high`, and `also`."""

    low: int
    high: int | None = None
    also: tuple[int, ...] = ()

    def parse(self, value: object) -> int:
        """Decimal digits or an int; a bool, a float or any other notation is refused."""
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,40}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(value)
        if value in self.also or (value >= self.low and (self.high is None or value <= self.high)):
            return value
        raise self.refuse(value)


@dataclass(frozen=True)
class Real(_Worded):
    """Finite numbers from `low` to `high`; an open end leaves the bound itself out."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    float32: bool = False

    def parse(self, value: object) -> float:
        """A float, never NaN or infinite, and never a negative zero."""
        if isinstance(value, str) and "_" not in value:
            try:
                value = float(value)
            except ValueError as error:
                raise self.refuse(value) from error
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(value)
        try:
            number = float(value)
        except OverflowError as error:
            raise self.refuse(value) from error
        if not self._holds(number):
            raise self.refuse(value)
        return number + 0.0

    def _holds(self, number: float) -> bool:
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return math.isfinite(number) and above and below and (not self.float32 or _fits_float32(number))


@dataclass(frozen=True)
class Choice(_Worded):
    """A few words or numbers."""

    values: tuple[str | int, ...]

    def parse(self, value: object) -> str | int:
        """The listed value that reads the same."""
        for candidate in self.values:
            if str(candidate) == str(value) and not isinstance(value, bool):
                return candidate
        raise self.refuse(value)


@dataclass(frozen=True)
class Switch(_Worded):
    """On or off; on the command line the flag alone says on."""

    allowed: str = "1, true, yes or 0, false, no"

    def parse(self, value: object) -> bool:
        """A bool, or one of the words, in any case."""
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise self.refuse(value)


@dataclass(frozen=True)
class Text(_Worded):
    """Text that matches a pattern as a whole."""

    pattern: str = r"[^\x00-\x1f]+"

    def parse(self, value: object) -> str:
        """The text as it is."""
        if isinstance(value, str) and re.fullmatch(self.pattern, value):
            return value
        raise self.refuse(value)

    def text(self, value: object) -> str:
        """The text as it is, unquoted."""
        return str(value)


def check_keys(value: Mapping[object, object], known: tuple[str, ...]) -> dict[str, object]:
    """The mapping with its keys typed; raises ValueError for a key outside of `known`."""
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ValueError(f"unknown key {shown(unknown[0])}: allowed is {', '.join(known)}")
    return {str(key): item for key, item in value.items()}


def _fits_float32(number: float) -> bool:
    """Whether rounding to float32 keeps the number finite, and above zero if it was."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    except OverflowError:
        return False
    return bool(math.isfinite(rounded) and (rounded != 0 or number == 0))
