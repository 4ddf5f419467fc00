"""What a field of the configuration says about itself: its flags, variable, set of values and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rlk.plan.domains import Domain, Switch


@dataclass(frozen=True)
class Option:
    """Stands in a field's `Annotated`, and makes pydantic parse the field through its domain.

    `run_default` replaces the field's default for `rlk run`. `in_profile` is false where a profile may not choose.
    """

    flags: tuple[str, ...]
    domain: Domain
    help: str
    run_default: object = None
    in_profile: bool = True

    @property
    def flag(self) -> str:
        """The short, canonical flag."""
        return self.flags[0]

    @property
    def variable(self) -> str:
        """The environment variable, `RLK_` and the canonical flag."""
        return "RLK_" + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return isinstance(self.domain, Switch)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._parse, handler(source))

    def _parse(self, value: object) -> object:
        return None if value is None else self.domain.parse(value)
