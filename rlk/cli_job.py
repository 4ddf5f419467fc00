"""`rlk job`: the other end of `--ray-address`, which Ray starts on a node of its cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlk.cli_output import Report
from rlk.driver.errors import RunError
from rlk.driver.joined import JoinedCluster
from rlk.driver.processes import interruptible
from rlk.driver.refusals import gpu_refusals
from rlk.driver.run import Job, execute
from rlk.driver.submission import read_submission
from rlk.plan.errors import ConfigErrors


def run_job(record: Path) -> Report:
    """Runs what was submitted, as a job of the cluster; the report goes to the job's log. Where it could not join or
    found no room, that is the report, and there is no run directory.

    Raises:
        ConfigErrors: versions, checkout or files are not those of the submitting side, or a GPU is refused.
    """
    submission = read_submission(record)
    differences = [f"this node, {os.uname().nodename}: {line}" for line in submission.differences()]
    if differences:
        raise ConfigErrors(differences)
    plan = submission.plan_of_run
    with interruptible():
        cluster = JoinedCluster(plan)
        try:
            cluster.start()
            refused = list(gpu_refusals(plan, cluster.gpus())) if plan.profile.device == "cuda" else []
            if refused:
                raise ConfigErrors(refused)
        except BaseException as error:
            cluster.stop()
            if isinstance(error, RunError):
                return Report(errors=(str(error),))
            raise
    outcome = execute(plan, verify=plan.config.command == "verify", out=sys.stdout, job=Job(cluster, submission))
    return Report(**{name: getattr(outcome, name) for name in Report.__dataclass_fields__})
