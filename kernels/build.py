"""Builds the CPU kernels once per machine: a shared library keyed by sources, flags, compiler and processor."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cpu"
# -ffp-contract=off: a fused multiply-add rounds once where the program says twice. -march=native is safe because
# the order of every operation is written out: wider vectors change the speed and no bit.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
         "-fPIC", "-shared", "-Wall", "-Wextra")  # fmt: skip


class BuildError(RuntimeError):
    """No compiler was found, or it refused the sources."""


def compiler() -> str:
    """The C++ compiler: $CXX, else g++, else clang++."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    for name in candidates:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"no C++ compiler among {', '.join(candidates)}: install g++ or set CXX")


def _processor() -> str:
    """What -march=native resolves to; a home folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    flags = [line for line in info.read_text().splitlines() if line.startswith("flags")][:1] if info.exists() else []
    return platform.machine() + "".join(flags)


def cache_folder() -> Path:
    """Where libraries are kept: $XDG_CACHE_HOME/rlk, else ~/.cache/rlk."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlk"


def library() -> Path:
    """Path of the built library; builds it when this machine has none for these sources.

    Raises:
        BuildError: there is no compiler, or it failed; the message carries its words.
    """
    cxx = compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join([*FLAGS, version, _processor()]).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cpp", ".h"}:
            digest.update(source.name.encode() + source.read_bytes())
    target = cache_folder() / f"rlk-kernels-{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(cxx, target)
    return target


def _compile(cxx: str, target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}.partial")
    command = [cxx, *FLAGS, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr.strip()[:2000]}")
    partial.rename(target)


if __name__ == "__main__":
    sys.stdout.write(f"{library()}\n")
