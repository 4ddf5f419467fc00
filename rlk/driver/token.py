"""Ray's authentication token: one of a session's own for a Ray that it starts, the caller's for one that is there."""

from __future__ import annotations

import os
import secrets

from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]


def use_own() -> None:
    """A new token, in memory: Ray would otherwise write one to the user's home, and say so."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    _enable()


def use_callers() -> None:
    """The token of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, unless RAY_AUTH_MODE says otherwise.

    As `ray.init` does for a cluster that runs; Ray's client of the Jobs API leaves it to its caller.
    """
    if "RAY_AUTH_MODE" not in os.environ and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        _enable()


def _enable() -> None:
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # Ray reads the mode when it is imported
    AuthenticationTokenLoader.instance().reset_cache()
