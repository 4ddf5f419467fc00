"""What a start-up proof raises."""

from __future__ import annotations


class ProofError(RuntimeError):
    """A kernel does not follow the declared order, or a probe cannot tell."""


def require(good: bool, kernel: str, what: str) -> None:
    """Raises ProofError with the kernel's name unless `good`."""
    if not good:
        raise ProofError(f"kernel {kernel}: {what}; this machine cannot run the canonical program with it")
