"""Waiting for ranks: every wait has a limit, and an error that names who was waited for and in which stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlk.driver.errors import RunError

log = logging.getLogger(__name__)


def collect(refs: Mapping[str, Any], timeout_s: float, stage: str) -> dict[str, Any]:
    """The results of all refs by role, in the order given.

    The first failure ends the wait: the other ranks would only wait for the one that failed.

    Raises:
        RunError: a rank failed or did not answer in time.
    """
    role_of = {ref: role for role, ref in refs.items()}
    pending, found = list(role_of), {}
    deadline = time.monotonic() + timeout_s
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = ", ".join(sorted(role_of[ref] for ref in pending))
            raise RunError(f"{stage}: no answer within {timeout_s:g} s from {missing}")
        found[role_of[ready[0]]] = _result(ready[0], role_of[ready[0]], stage)
    return {role: found[role] for role in refs}


def _result(ref: Any, role: str, stage: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        log.error("%s failed in %s:\n%s", role, stage, error)
        cause = error.cause or error
        raise RunError(f"{stage}: {role}: {type(cause).__name__}: {' '.join(str(cause).split())[:500]}") from error
    except RayActorError as error:
        log.error("%s died in %s:\n%s", role, stage, error)
        raise RunError(f"{stage}: {role} died: see the log for what Ray says of it") from error
