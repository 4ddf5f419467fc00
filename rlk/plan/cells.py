"""Matrices: flat lists of cells, each one configuration with a sentence about what it shows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlk.plan.derive import Plan, derive
from rlk.plan.errors import ConfigErrors, shown
from rlk.plan.profile import DEFAULT_PROFILE, Profile, load_profile
from rlk.plan.resolve import resolve
from rlk.plan.shape import ModelShape, read_shape

M = TypeVar("M", bound=BaseModel)
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class Cell(BaseModel):
    """One row of a matrix. `config` holds option values by field name, stronger than the profile's defaults."""

    model_config = _STRICT

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    sentence: str = Field(min_length=20)
    config: dict[str, Any]
    variant: str = Field("", pattern=r"^[a-z0-9]*$")
    """What the id says after that of the configuration, where two cells differ in steps or lengths only."""
    timeout_s: int = Field(ge=1)
    """Seconds after which the cell's run is ended and red."""
    seconds: float | None = Field(None, gt=0)
    """What it was measured to take on two cores, to spread cells over jobs."""
    profile: str = DEFAULT_PROFILE
    engine: dict[str, int] = Field(default_factory=dict)
    """Limits of the engines that are not those of the profile, by field of its `engine`."""
    marks: tuple[Literal["cpu", "gpu", "h100"], ...] = ("cpu",)

    def plan(self, cwd: Path) -> Plan:
        """The plan of a `verify` of this cell, whatever the environment; raises ConfigErrors, each line with the id."""
        profile = load_profile(self.profile, cwd)
        return self.plan_on(profile, read_shape(profile.model))

    def changed(self, changes: Mapping[str, Any], cwd: Path) -> Plan:
        """The plan of this cell with other option values, by field name; None takes one away. What id it has follows
        from them."""
        profile = load_profile(self.profile, cwd)
        merged = {name: value for name, value in {**self.config, **changes}.items() if value is not None}
        return self.model_copy(update={"config": merged})._derived(profile, read_shape(profile.model))

    def plan_on(self, profile: Profile, shape: ModelShape) -> Plan:
        """As `plan`, on a profile and a shape that are already read."""
        plan = self._derived(profile, shape)
        derived = f"{plan.cell}-{self.variant}" if self.variant else plan.cell
        if derived != self.id:
            raise ConfigErrors([f"cell {self.id}: its configuration is that of {derived}: correct the id"])
        return plan

    def _derived(self, profile: Profile, shape: ModelShape) -> Plan:
        try:
            profile = profile.limited(self.engine)
            return derive(resolve(self.config, {}, profile, shape, command="verify", first="cell"), profile, shape)
        except ConfigErrors as error:
            raise ConfigErrors(f"cell {self.id}: {line}" for line in error.errors) from error


class _Matrix(BaseModel):
    model_config = _STRICT

    format: Literal["rlk.cells/1"]
    cells: tuple[Cell, ...] = Field(min_length=1)


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key said twice, where PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {shown(key)} said twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_matrix(path: str | Path, form: type[M]) -> M:
    """A matrix file as its form validates it; raises ConfigErrors for any fault of it."""
    try:
        # Mappings become tuples and numbers as in JSON, so that strict types mean the same in both.
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys)
        return form.model_validate(_tuples(content))
    except OSError as error:
        raise ConfigErrors([f"matrix {path}: {error.strerror}"]) from error
    except yaml.YAMLError as error:
        raise ConfigErrors([f"matrix {path}: {' '.join(str(error).split())}"]) from error
    except ValidationError as error:
        raise ConfigErrors(
            f"matrix {path}: {'.'.join(map(str, fault['loc']))} {shown(fault['input'])}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        ) from error


def load_cells(path: str | Path) -> tuple[Cell, ...]:
    """The cells of a matrix file, in the order of the file; raises ConfigErrors for any fault of its form."""
    matrix = read_matrix(path, _Matrix)
    ids = [cell.id for cell in matrix.cells]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ConfigErrors(f"matrix {path}: cell {name}: said twice: an id names one cell" for name in twice)
    return matrix.cells


def _tuples(content: object) -> object:
    """Lists as tuples, which strict validation asks for where a field is a tuple."""
    if isinstance(content, list):
        return tuple(_tuples(item) for item in content)
    if isinstance(content, dict):
        return {key: _tuples(item) for key, item in content.items()}
    return content
