"""The record of a submission: what the submitting side planned and ran, for the job to compare with what it finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import JsonValue

from rlk.driver.provenance import repository, versions
from rlk.evidence.documents import Document
from rlk.evidence.errors import EvidenceError
from rlk.evidence.schemas import Repository
from rlk.plan.derive import Plan
from rlk.plan.errors import ConfigErrors
from rlk.plan.profile import load_profile
from rlk.plan.shape import read_shape


class Submission(Document):
    """RUN_ID.submission.json, beside the run directory. `arguments` are the words of the submitting command line."""

    SCHEMA: ClassVar[str] = "rlk.submission/1"

    submission_id: str
    ray_address: str
    plan: dict[str, JsonValue]
    arguments: tuple[str, ...]
    versions: dict[str, str]
    repository: Repository

    @classmethod
    def of(cls, plan: Plan, submission_id: str, ray_address: str, arguments: tuple[str, ...]) -> Submission:
        """The record as this process would write it."""
        return cls(
            submission_id=submission_id,
            ray_address=ray_address,
            plan=json.loads(plan.to_json()),
            arguments=arguments,
            versions=versions(),
            repository=repository(),
        )

    @property
    def plan_of_run(self) -> Plan:
        """The plan to run. Raises ConfigErrors."""
        return Plan.from_json(json.dumps(self.plan))

    def differences(self) -> Iterator[str]:
        """One line for each thing that is not here as it was where the run was submitted."""
        here = versions()
        for name in sorted(self.versions | here):
            there = self.versions.get(name, "nothing")
            if here.get(name) != there:
                yield f"{name} {here.get(name, 'is missing')}: allowed is the submitting side's {there}: install that"
        checkout = repository()
        if checkout != self.repository:
            yield (
                f"checkout {checkout.revision}, patch {checkout.patch_sha256}: allowed is the submitting side's "
                f"{self.repository.revision}, patch {self.repository.patch_sha256}: share one folder between both"
            )
        plan = self.plan_of_run
        if load_profile(plan.profile.origin, Path("/")) != plan.profile:
            yield f"profile {plan.profile.origin}: its content differs from what was submitted: share one file system"
        if read_shape(plan.profile.model) != plan.shape:
            yield f"model {plan.profile.model}: its config.json differs from what was submitted: share one file system"


def read_submission(path: Path) -> Submission:
    """The record at `path`. Raises ConfigErrors where it cannot be read."""
    try:
        return Submission.from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigErrors(
            [f"{path}: {error.strerror}: allowed is an output root on a file system that the cluster's node shares"]
        ) from error
    except EvidenceError as error:
        raise ConfigErrors([str(error)]) from error
