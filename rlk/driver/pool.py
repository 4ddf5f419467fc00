"""Many runs in one session, for as long as it holds: what a test session and the matrix do."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

from rlk.driver.progress import LiveView
from rlk.driver.run import Outcome, execute_in
from rlk.driver.session import Session
from rlk.plan.derive import Plan
from rlk.plan.naming import new_run_id
from rlk.plan.profile import Profile

Lease = Callable[[Profile], AbstractContextManager[object]]


class Pool:
    """The one session that is alive. A plan of another profile ends it and starts its own; so does any plan after a run
    that did not come to its end, since ranks may still wait for each other."""

    def __init__(self, output: Path, lease: Lease | None = None) -> None:
        """`output`: the folder that gets the run directories. `lease`: what a profile with GPUs holds meanwhile."""
        self.output, self._lease = output, lease
        self.run_dir: Path | None = None
        """Of the last run, also of one that came to nothing; it exists once that run began."""
        self._leased = ExitStack()
        self._session: Session | None = None

    def run(self, plan: Plan, out: TextIO) -> tuple[Plan, Outcome]:
        """A run of the plan from the initial state, under a run id and in the folder of this pool. `out` shows
        progress."""
        run_id = new_run_id(plan.cell, datetime.now(), secrets.token_hex(2))
        config = plan.config.model_copy(update={"output_root": str(self.output)})
        plan, self.run_dir = replace(plan, config=config).with_run_id(run_id), self.output / run_id
        if self._session is not None and not self._session.serves(plan):
            self.stop()
        with LiveView(out, plan.config.steps) as watch:
            if self._session is None:
                if self._lease is not None and plan.profile.device == "cuda":
                    self._leased.enter_context(self._lease(plan.profile))
                self._session = Session(plan)
                self._session.start(watch)
            return plan, execute_in(self._session, plan, watch)

    def stop(self) -> None:
        """Ends the session's processes, and gives back what was leased after that."""
        with self._leased:
            if self._session is not None:
                session, self._session = self._session, None
                session.stop()
