"""Writes one run directory: created exclusively, every file whole or absent, nothing changed after the seal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlk.evidence import digest, files, layout
from rlk.evidence.arrays import BatchArrays, OracleArrays, RolloutArrays, TrainArrays
from rlk.evidence.errors import EvidenceError
from rlk.evidence.probe import Probe
from rlk.evidence.ray_status import RayStatus
from rlk.evidence.samples import merge
from rlk.evidence.schemas import Fingerprints, Manifest, Metrics, TrajectoryLine, Update
from rlk.evidence.seal import seal
from rlk.evidence.validate import validate, validate_record
from rlk.evidence.verdict import Validation
from rlk.plan.derive import Plan


class RunWriter:
    """The one writer of a run directory. Every method writes at once; only the manifest may be written again.

    Order for a step s: rollout (each engine), batch, oracle, train (each rank), update, fingerprints of version s + 1,
    trajectory, [probe (each rank)], metrics. Before the first step: manifest, plan, fingerprints of version 0. Last:
    finish, with `log` closed.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._digest = digest.START
        self._finished = False

    @classmethod
    def create(cls, output_root: Path, run_id: str) -> RunWriter:
        """Make output_root/run_id. Raises EvidenceError where the id is malformed or was used before."""
        if not layout.RUN_ID.fullmatch(run_id):
            raise EvidenceError(f"run id {run_id!r}: letters, digits, '.', '_' and '-' are allowed, 128 at most")
        run_dir = output_root / run_id
        output_root.mkdir(parents=True, exist_ok=True)
        try:
            run_dir.mkdir()
        except FileExistsError as error:
            raise EvidenceError(f"run id {run_id!r}: was used before in {output_root}; choose another") from error
        (run_dir / layout.LOG).touch()
        return cls(run_dir)

    @property
    def log(self) -> Path:
        """The log file, which exists from the start. Close it before `finish`: the seal covers it."""
        return self.run_dir / layout.LOG

    def manifest(self, manifest: Manifest) -> None:
        """Write the manifest, or put a newer one in its place."""
        files.replace(self._path(layout.MANIFEST), f"{manifest.to_json(indent=2)}\n".encode())

    def plan(self, plan: Plan) -> None:
        """Write plan.json."""
        files.write_new(self._path(layout.PLAN), f"{plan.to_json()}\n".encode())

    def rollout(self, step: int, engine: int, arrays: RolloutArrays) -> None:
        """Write what one engine generated in a step."""
        place = {"step": step, "engine": engine}
        files.write_new(self._path(layout.rollout_file(step, engine)), arrays.to_bytes(place))

    def train(self, step: int, tp_rank: int, cp_rank: int, cp: int, arrays: TrainArrays) -> None:
        """Write what one train rank scored in a step; `cp` is the CP degree."""
        rank = tp_rank * cp + cp_rank
        place = {"step": step, "rank": rank, "tp_rank": tp_rank, "cp_rank": cp_rank}
        files.write_new(self._path(layout.train_file(step, rank)), arrays.to_bytes(place))

    def batch(self, step: int, arrays: BatchArrays) -> None:
        """Write the rewards and advantages of a step."""
        files.write_new(self._path(layout.batch_file(step)), arrays.to_bytes({"step": step}))

    def oracle(self, step: int, weights: str, arrays: OracleArrays) -> None:
        """Write what the oracle says of a step; `weights` is the hash of what it computed with, see `weights_hash`."""
        files.write_new(self._path(layout.oracle_file(step)), arrays.to_bytes({"step": step, "weights": weights}))

    def probe(self, step: int, probe: Probe) -> None:
        """Write what one rank recorded in a step of a probed run."""
        files.write_new(self._path(layout.probe_file(step, probe.role)), probe.to_bytes(step))

    def update(self, update: Update) -> None:
        """Write the fingerprints of a step's gradients and of the optimizer's state after it."""
        files.write_new(self._path(layout.update_file(update.step)), f"{update.to_json()}\n".encode())

    def fingerprints(self, fingerprints: Fingerprints) -> None:
        """Write the fingerprints of one weight version."""
        path = self._path(layout.fingerprint_file(fingerprints.version))
        files.write_new(path, f"{fingerprints.to_json()}\n".encode())

    def metrics(self, metrics: Metrics) -> None:
        """Append the line of one step."""
        files.append_line(self._path(layout.METRICS), metrics.to_json())

    def trajectory(
        self, step: int, rollouts: Sequence[RolloutArrays], batch: BatchArrays, made: digest.Made
    ) -> TrajectoryLine:
        """Hash a step, append its line and return it."""
        line = digest.trajectory_line(step, merge(rollouts), batch, made, self._digest)
        files.append_line(self._path(layout.TRAJECTORY), line.to_json())
        self._digest = line.digest
        return line

    def finish(self, manifest: Manifest, ray: RayStatus) -> Validation:
        """Write the last manifest, Ray's status and the verdict, seal all, and validate the sealed directory.

        Raises nothing for missing evidence: a run that failed half way is sealed too, and its verdict is red.
        """
        self.manifest(manifest)
        files.write_new(self._path(layout.RAY_STATUS), ray.to_text().encode())
        verdict = validate_record(self.run_dir)
        files.write_new(self._path(layout.VALIDATION), f"{verdict.to_json(indent=2)}\n".encode())
        self._finished = True
        seal(self.run_dir)
        return validate(self.run_dir)

    def _path(self, name: str) -> Path:
        if self._finished:
            raise EvidenceError(f"{name}: the run is sealed, nothing may be written any more")
        return self.run_dir / name
