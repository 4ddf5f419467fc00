"""Why a mutant of the validator may survive: part of the module's name, a pattern of `before => after`, the reason."""

from __future__ import annotations

REASONS: tuple[tuple[str, str, str], ...] = (
    ("", r"@dataclass\(frozen=True\) => @dataclass\(frozen=False\)", "nobody assigns to these fields: mypy holds that"),
)
