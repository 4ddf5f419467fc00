"""The one error of this room."""

from __future__ import annotations


class EvidenceError(ValueError):
    """Evidence that is missing, malformed or contradicts itself. The text is one line and starts with the file."""
