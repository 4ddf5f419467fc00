"""Where a run comes from: versions, repository, paths."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from rlk.evidence.schemas import Repository
from rlk.plan.derive import Plan

PACKAGES = ("rlk", "torch", "vllm", "ray", "numpy", "safetensors", "tokenizers", "transformers", "pydantic")
ROOT = Path(__file__).parents[2]


def versions() -> dict[str, str]:
    """Python and the packages whose version can change a result."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def repository() -> Repository:
    """The checkout that runs; its uncommitted difference as a hash. An installed copy has no revision."""
    revision = _git("rev-parse", "HEAD")
    if revision is None:
        return Repository(revision=None, dirty=False, patch_sha256=None)
    status = _git("status", "--porcelain") or b""
    if not status.strip():
        return Repository(revision=revision.decode().strip(), dirty=False, patch_sha256=None)
    digest = hashlib.sha256(_git("diff", "HEAD", "--binary") or b"")
    for name in sorted((_git("ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")):
        if name:
            digest.update(name + b"\0" + _content(ROOT / name.decode()))
    return Repository(revision=revision.decode().strip(), dirty=True, patch_sha256=digest.hexdigest())


def revision() -> str | None:
    """The commit that runs, in one word."""
    return in_one_word(repository())


def in_one_word(found: Repository) -> str | None:
    """A commit; with + and a hash where files were changed."""
    return f"{found.revision}+{found.patch_sha256[:12]}" if found.patch_sha256 else found.revision


def _content(path: Path) -> bytes:
    """What is hashed of an untracked name, as git itself would take it: where a link leads, and nothing of a folder
    that is a repository of its own."""
    if path.is_symlink():
        return os.readlink(path).encode()
    return b"" if path.is_dir() else path.read_bytes()


def _git(*words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def runtime(plan: Plan, run_dir: Path) -> dict[str, str]:
    """Paths and machine."""
    return {
        "python": sys.executable,
        "framework": str(ROOT),
        "model": plan.profile.model,
        "reference": plan.profile.reference or plan.profile.model,
        "prompts": plan.profile.prompts,
        "run_dir": str(run_dir.resolve()),
        "host": platform.node(),
        "machine": platform.machine(),
        "device": plan.profile.device,
    }
