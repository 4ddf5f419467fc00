"""A run ends what it started, and nothing that its caller had."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

import psutil

from rlk.driver.processes import Ledger

SLEEP = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{SLEEP}']); {SLEEP}"


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_grandchild(process: subprocess.Popen[bytes]) -> psutil.Process:
    while not (found := psutil.Process(process.pid).children()):
        assert process.poll() is None
    return found[0]


def test_what_the_caller_had_lives_on() -> None:
    with child(SLEEP) as before:
        ledger = Ledger()
        with child(PARENT) as own:
            grandchild = wait_for_grandchild(own)
            ledger.record_children()
            recorded = {owned.pid for owned in ledger.owned}
            assert {own.pid, grandchild.pid} <= recorded
            assert before.pid not in recorded
            ledger.end_all(5.0)
            own.wait(5)
            assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        assert before.poll() is None


def test_multiprocessings_helpers_are_not_of_a_run() -> None:
    ledger = Ledger()
    resource_tracker.ensure_running()
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    ledger.record_children()
    assert tracker not in {owned.pid for owned in ledger.owned}
