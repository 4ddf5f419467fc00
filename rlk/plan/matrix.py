"""The matrix: every pair of topologies under every sampling setting, and which cells are run and which composed.

A trainer sees tokens, log-probabilities and rewards only, an engine weights only. So where one row of pairs (a fixed
train topology, every rollout topology) and one column (every train topology, a fixed rollout topology) make the same
trajectory step by step, every other pair makes it too: it is composed of the one in its column and the one in its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlk.plan.cells import load_cells, read_matrix
from rlk.plan.derive import Plan, derive
from rlk.plan.errors import ConfigErrors, shown
from rlk.plan.naming import sampling_slug
from rlk.plan.profile import Profile, load_profile
from rlk.plan.resolve import resolve
from rlk.plan.shape import ModelShape, read_shape

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
How = Literal["run", "composed"]


class Degrees(BaseModel):
    """One topology, as a file says it."""

    model_config = _STRICT

    tp: Literal[1, 2, 4, 8]
    cp: Literal[1, 2, 4, 8]


class Through(BaseModel):
    """The row and the column that are run for a composed setting."""

    model_config = _STRICT

    train: Degrees
    rollout: Degrees


class Topologies(BaseModel):
    """matrices/topologies.yaml: both sides' topologies, and what all cells have in common."""

    model_config = _STRICT

    format: Literal["rlk.topologies/1"]
    profile: str
    options: dict[str, Any] = {}
    """Option values of every cell, by field name."""
    train: tuple[Degrees, ...] = Field(min_length=1)
    rollout: tuple[Degrees, ...] = Field(min_length=1)
    through: Through


class Setting(BaseModel):
    """One sampling setting of all pairs."""

    model_config = _STRICT

    sentence: str = Field(min_length=20)
    config: dict[str, Any]
    steps: int = Field(ge=2)
    how: How


class Samplings(BaseModel):
    """matrices/sampling.yaml."""

    model_config = _STRICT

    format: Literal["rlk.samplings/1"]
    settings: tuple[Setting, ...] = Field(min_length=1)


@dataclass(frozen=True)
class MatrixCell:
    """One pair of topologies under one setting. `sources`: ids of the two cells that a composed one follows from.

    Of a cell of a flat file: `variant` is what its id says beyond the plan's, `limit_s` the most seconds of one run,
    `sentence` what it shows.
    """

    plan: Plan
    how: How
    sources: tuple[str, ...]
    variant: str = ""
    limit_s: int | None = None
    sentence: str = ""

    @property
    def id(self) -> str:
        """What its configuration derives, and its variant."""
        return f"{self.plan.cell}{self.variant and '-'}{self.variant}"

    @property
    def sampling(self) -> str:
        """The setting's part of the id, such as `t0.7-p0.95-koff`; cells of one setting make one trajectory."""
        return f"{sampling_slug(self.plan.config.samplings)}{self.variant and '-'}{self.variant}"


def listed(
    path: Path,
    cwd: Path,
    *,
    profile: str | None = None,
    only: str = "",
    ids: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> list[MatrixCell]:
    """The cells of a flat matrix file whose id contains `only`, in its order, or those of `ids` in theirs; on another
    profile where one is named, with other option values where `changes` gives them.

    Raises ConfigErrors for any fault of the file, the profile or a cell.
    """
    found = {cell.id: cell for cell in load_cells(path)}
    unknown = [name for name in ids if name not in found]
    if unknown:
        raise ConfigErrors(f"--cell {shown(name)}: allowed is one of {', '.join(found)}" for name in unknown)
    chosen = [found[name] for name in dict.fromkeys(ids)] or [cell for cell in found.values() if only in cell.id]
    if profile is not None:
        chosen = [cell.model_copy(update={"profile": profile}) for cell in chosen]
    cells = [
        MatrixCell(
            cell.changed(changes, cwd) if changes else cell.plan(cwd),
            "run",
            (),
            cell.variant,
            cell.timeout_s,
            cell.sentence,
        )
        for cell in chosen
    ]
    twice = [one for one, count in Counter(cell.id for cell in cells).items() if count > 1]
    if twice:
        raise ConfigErrors(f"{name}: several cells become this one: choose one with --cell" for name in twice)
    return cells


@dataclass(frozen=True)
class Matrix:
    """Both files together, on the profile and the model that the first one names."""

    topologies: Topologies
    samplings: Samplings
    profile: Profile
    shape: ModelShape

    @staticmethod
    def load(topologies: Path, samplings: Path, cwd: Path) -> Matrix:
        """Reads both files and the profile; raises ConfigErrors for any fault of their form."""
        first = read_matrix(topologies, Topologies)
        profile = load_profile(first.profile, cwd)
        return Matrix(first, read_matrix(samplings, Samplings), profile, read_shape(profile.model))

    def cells(self) -> Iterator[MatrixCell]:
        """All cells, those of one pair together, in an order in which a session moves as little as possible: an engine
        takes seconds to start, a trainer's groups a fraction of one. Raises ConfigErrors for options out of range."""
        for rollout in self.topologies.rollout:
            for train in self.topologies.train:
                for setting in self.samplings.settings:
                    yield self._cell(train, rollout, setting)

    def _cell(self, train: Degrees, rollout: Degrees, setting: Setting) -> MatrixCell:
        plan, through = self._plan(train, rollout, setting), self.topologies.through
        if setting.how == "run" or train == through.train or rollout == through.rollout:
            return MatrixCell(plan, "run", ())
        row, column = self._plan(through.train, rollout, setting), self._plan(train, through.rollout, setting)
        return MatrixCell(plan, "composed", (row.cell, column.cell))

    def _plan(self, train: Degrees, rollout: Degrees, setting: Setting) -> Plan:
        degrees = {"tp": train.tp, "cp": train.cp, "rollout_tp": rollout.tp, "rollout_cp": rollout.cp}
        said = {**self.topologies.options, **degrees, **setting.config, "steps": setting.steps}
        config = resolve(said, {}, self.profile, self.shape, command="verify", first="cell")
        return derive(config, self.profile, self.shape)
