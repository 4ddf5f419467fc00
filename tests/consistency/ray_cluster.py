"""A Ray cluster for tests: a head node with its dashboard, what submits to it, and the waits of a busy machine.

It is told of 2 GPUs that it has not, so that a placement group has some to give out.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.plugin import ROOT

START_S, END_S = 300, 60
LIMIT_S = 1800
"""Beyond the waits on the way, so that on a busy machine the run gives up and says what it waited for: Ray's for a job
to start (900 s), and of the product for a placement, for its GPUs (300 s each) and for an end."""
CLUSTER = "import sys; from ray.scripts.scripts import main; sys.exit(main())"


@dataclass(frozen=True)
class Ray:
    """A cluster of this test."""

    address: str
    environment: dict[str, str]
    profile: Path

    def rlk(self, *words: str, profile: Path | None = None) -> subprocess.Popen[str]:
        """The command line, on this cluster's address and profile."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "rlk",
            *words,
            "--ray-address",
            self.address,
            "--profile",
            str(profile or self.profile),
        ]
        return subprocess.Popen(
            [*command, "--output-root", str(self.runs)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def runs(self) -> Path:
        """Where the run directories are."""
        return self.profile.parent / "runs"

    def job(self, *words: str) -> str:
        """What `ray job` says."""
        command = [sys.executable, "-c", CLUSTER, "job", *words]
        environment = {**self.environment, "RAY_API_SERVER_ADDRESS": f"http://{self.address}"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.stdout


def ended(process: subprocess.Popen[str]) -> str:
    """What a command said until it ended."""
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"no end within {LIMIT_S} s, and until then:\n{process.communicate()[0]}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def cluster(folder: Path) -> Iterator[Ray]:
    """A head node with a token of its own; every process of it is gone afterwards."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RLK_"))}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**kept, **token, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    dashboard, agent = _free_port(), _free_port()
    sockets = Path("/tmp") / f"rlk-{secrets.token_hex(4)}"  # paths have at most 107 characters
    options = {
        "--port": _free_port(),
        "--dashboard-port": dashboard,
        "--dashboard-agent-listen-port": agent,
        "--num-cpus": 16,
        "--num-gpus": 2,
        "--resources": json.dumps({"accelerator_type:H100": 1}),
        "--object-store-memory": 256 << 20,
        "--temp-dir": sockets,
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, "start", "--head", "--block", *words],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        _wait_for_node(dashboard, agent, token["RAY_AUTH_TOKEN"], head)
        yield Ray(f"127.0.0.1:{dashboard}", environment, _profile(folder))
    finally:
        _end(head)
        shutil.rmtree(sockets, ignore_errors=True)


def _end(head: subprocess.Popen[bytes]) -> None:
    if head.poll() is not None:
        return
    processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    head.terminate()
    for left in psutil.wait_procs(processes, timeout=END_S)[1]:
        left.kill()
    head.wait()


def _wait_for_node(dashboard: int, agent: int, token: str, head: subprocess.Popen[bytes]) -> None:
    """Waits until the dashboard lists the node and the agent listens, who starts jobs there: the dashboard answers
    before that."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert head.poll() is None, "the head node ended"
        if "ALIVE" in _states(dashboard, token) and _listens(agent):
            return
        time.sleep(0.2)
    pytest.fail(f"no node within {START_S} s")


def _states(dashboard: int, token: str) -> list[str]:
    """Those of the nodes that the dashboard lists; none while it does not answer."""
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{dashboard}/api/v0/nodes", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return [node["state"] for node in json.load(answer)["data"]["result"]["result"]]
    except OSError:
        return []


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def _profile(folder: Path) -> Path:
    content = json.loads((ROOT / "rlk" / "plan" / "profiles" / "tiny-cpu.json").read_text())
    content |= {"ranks": 4, "model": str(ROOT / content["model"]), "prompts": str(ROOT / content["prompts"])}
    content["engine"] |= {"max_engines": 1}
    content["defaults"] = {"tp": 2, "rollout_tp": 2, "max_response_len": 16, "lr": 1e-4}
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return path
