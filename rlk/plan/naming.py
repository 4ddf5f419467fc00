"""Names of configurations and runs. A cell's id says its topology and sampling, and is derived, never typed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime

from rlk.plan.config import OPTIONS, RunConfig
from rlk.plan.sampling import Sampling
from rlk.plan.topology import Topology


def cell_id(config: RunConfig, train: Topology, rollout: Topology) -> str:
    """An id such as `tp2_rtp4-cp4-t0.7-p0.95-koff`.

    `tp{n}_rtp{m}` is adjacent and first, so that `pytest -k tp2_rtp4` picks that pair. Rollout CP above 1 adds `-rcp2`
    after cp, a batch of several samplings says `mixed`, native mode adds `-native`.
    """
    parts = [f"tp{train.tp}_rtp{rollout.tp}", f"cp{train.cp}"]
    if rollout.cp > 1:
        parts.append(f"rcp{rollout.cp}")
    parts.append(sampling_slug(config.samplings))
    if config.mode == "native":
        parts.append("native")
    return "-".join(parts)


def sampling_slug(samplings: Sequence[Sampling]) -> str:
    """The part of an id that names the sampling, such as `t0.7-p0.95-koff`, or `mixed`."""
    return samplings[0].slug if len(set(samplings)) == 1 else "mixed"


def new_run_id(cell: str, now: datetime, token: str) -> str:
    """A run id that sorts by time, says the cell, and with a random token of 4 hex digits is not used twice."""
    return f"{now:%Y%m%d-%H%M%S}-{cell}-{token}"


def command_line(config: RunConfig, effective: dict[str, object]) -> str:
    """The command that says everything: each option with its effective value; options without a value are left out."""
    words = ["rlk", config.command]
    for name, option in OPTIONS.items():
        value = effective[name]
        if option.is_switch:
            words += [option.flag] if value else []
        elif value is not None:
            words += [option.flag, option.domain.text(value)]
    return shlex.join(words)
