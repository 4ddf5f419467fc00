"""What can go wrong in a run, said in one line."""

from __future__ import annotations


class RunError(RuntimeError):
    """A run cannot go on. The message names the stage and the process."""
