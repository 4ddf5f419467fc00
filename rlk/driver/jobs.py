"""Ray's Jobs API: the cluster that is there, the node that fits, a submission, and the end that its job comes to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import aiohttp
import ray
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from rlk.driver import token
from rlk.plan.derive import Plan
from rlk.plan.errors import ConfigErrors
from rlk.plan.placement import Placement, placement

POLL_S = 0.5
LOST_S = 60
"""How long a cluster may be out of reach before its job counts as lost."""
UNREACHABLE = "UNREACHABLE"
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
_NODE_SHARE = 0.001  # of a node's own resource, which only says which node


@dataclass(frozen=True)
class Node:
    """One node of a cluster, with all the resources that it has."""

    ip: str
    head: bool
    resources: Mapping[str, float]

    @property
    def hopper(self) -> bool:
        """Whether Ray found Hopper GPUs on it."""
        return any(f"accelerator_type:{name}" in self.resources for name in HOPPER)

    @property
    def gpus(self) -> int:
        """GPUs that Ray may give out there."""
        return int(self.resources.get("GPU", 0))


class Jobs:
    """The Jobs server of one cluster."""

    def __init__(self, address: str) -> None:
        """Connects.

        Raises:
            ConfigErrors: nobody answers, the token is refused, or the cluster runs another Ray.
        """
        self.address = address if "://" in address else f"http://{address}"
        token.use_callers()
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # it reports that a log ended
        try:
            self.client = JobSubmissionClient(self.address)
            found = self.client._server_ray_version  # the public get_version is that of the protocol
        except AuthenticationError as error:
            raise self._refused("its token was refused: allowed is the cluster's, in RAY_AUTH_TOKEN") from error
        except (RuntimeError, OSError) as error:
            raise self._refused(
                "no Ray dashboard answers: allowed is the address that `ray start --head` prints for it, port 8265 "
                "unless said otherwise; the cluster needs ray[default]"
            ) from error
        if found != ray.__version__:
            raise self._refused(f"the cluster runs Ray {found}: allowed is {ray.__version__}, which this side has")

    def node(self, plan: Plan) -> tuple[Node, Placement]:
        """The node to run on, the head if it fits, and the placement there.

        Raises:
            ConfigErrors: no node is large enough.
        """
        try:
            listed = list_nodes(address=self.address, detail=True, filters=[("state", "=", "ALIVE")])
        except (RayStateApiException, OSError) as error:
            raise self._refused("the cluster does not list its nodes: look at its dashboard's log") from error
        nodes = [Node(n.node_ip, n.is_head_node, n.resources_total) for n in listed]
        return fitting_node(plan, nodes, f"--ray-address {self.address}")

    def submit(self, name: str, entrypoint: str, node: Node, environment: Mapping[str, str]) -> None:
        """Submits a job that runs on that node. Raises ConfigErrors where the server refuses it."""
        try:
            self.client.submit_job(
                entrypoint=entrypoint,
                submission_id=name,
                runtime_env={"env_vars": dict(environment)},
                entrypoint_resources={f"node:{node.ip}": _NODE_SHARE},
            )
        except (RuntimeError, OSError) as error:
            raise self._refused(f"the job was refused: {_one_line(error)}") from error

    def follow(self, name: str, out: TextIO) -> None:
        """Writes the job's log to `out` until it ends. A log that breaks off ends nothing but the log."""
        try:
            asyncio.run(self._tail(name, out))
        except (RuntimeError, aiohttp.ClientError) as error:
            out.write(f"the log of job {name} broke off: {_one_line(error)}\n")

    async def _tail(self, name: str, out: TextIO) -> None:
        async for lines in self.client.tail_job_logs(name):
            out.write(lines)
            out.flush()

    def end(self, name: str, limit_s: float | None = None) -> tuple[str, str]:
        """The job's terminal state and Ray's sentence about it, waited for; UNREACHABLE where its cluster went away.

        Raises:
            TimeoutError: it had none within the limit.
        """
        start = heard = time.monotonic()
        while True:
            try:
                info, heard = self.client.get_job_info(name), time.monotonic()
            except (RuntimeError, OSError) as error:  # requests' errors are among the latter
                if time.monotonic() - heard > LOST_S:
                    return UNREACHABLE, f"the cluster stopped answering: {_one_line(error)}"
            else:
                if info.status.is_terminal():
                    return info.status.value, _one_line(info.message or "")
            if limit_s is not None and time.monotonic() - start > limit_s:
                raise TimeoutError(f"job {name} did not end within {limit_s:g} s")
            time.sleep(POLL_S)

    def stop(self, name: str) -> None:
        """Asks the job to end."""
        self.client.stop_job(name)

    def _refused(self, why: str) -> ConfigErrors:
        return ConfigErrors([f"--ray-address {self.address}: {why}"])


def fitting_node(plan: Plan, nodes: Sequence[Node], said: str) -> tuple[Node, Placement]:
    """The first node, the head before the others, that has the CPUs and GPUs for all ranks.

    Raises:
        ConfigErrors: none has; the line lists what each has.
    """
    for node in sorted(nodes, key=lambda node: (not node.head, node.ip)):
        wanted = placement(plan, node.gpus)
        enough = all(node.resources.get(name, 0) >= amount for name, amount in wanted.total.items())
        if enough and (node.hopper or not wanted.gpus):
            return node, wanted
    wanted = placement(plan, max((node.gpus for node in nodes), default=0))
    kind = " Hopper" if wanted.gpus else ""
    needs = " and ".join(f"{amount:g}{kind if name == 'GPU' else ''} {name}" for name, amount in wanted.total.items())
    has = "; ".join(f"{node.ip} has {_listed(node)}" for node in nodes) or "it has no node"
    raise ConfigErrors(
        [f"{said}: {plan.ranks} ranks need one node with {needs}: {has}: start a larger node, or fewer ranks"]
    )


def _listed(node: Node) -> str:
    kinds = [name.partition(":")[2] for name in node.resources if name.startswith("accelerator_type:")]
    gpus = f"{node.gpus} GPU ({', '.join(kinds) or 'of no known kind'})" if node.gpus else "no GPU"
    return f"{node.resources.get('CPU', 0):g} CPU and {gpus}"


def _one_line(error: Any) -> str:
    return " ".join(str(error).split())[:400]
