"""Makes a small valid run directory in plain numpy, with places to break it.

2 steps, 2 engines of 2 ranks, 4 train ranks (TP2 x CP2), 4 samples a step in 2 groups: the least at which every
check has something to compare: replicas, shards, a second engine, a second weight version, and each kind of
sampling (nucleus, greedy, full support, all three cuts). evidence_steps makes the arrays, evidence_said what the
processes say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlk.evidence import files, layout
from rlk.evidence.arrays import BatchArrays, OracleArrays, RolloutArrays, TrainArrays
from rlk.evidence.counts import batch_counts
from rlk.evidence.digest import START, Made, trajectory_line, weights_hash
from rlk.evidence.probe import Probe
from rlk.evidence.ray_status import Actor, RayStatus
from rlk.evidence.schemas import Fingerprints, Generated, Manifest, Metrics, Seconds, TrajectoryLine, Update
from rlk.evidence.validate import validate_record
from rlk.evidence.verdict import Validation
from rlk.evidence.writer import RunWriter
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.profile import EngineLimits, Profile
from rlk.plan.shape import ModelShape
from tests.unit.evidence_said import make_fingerprints, make_update, manifest_fields
from tests.unit.evidence_steps import EOS, LENGTHS, Step, make_step, oracle_columns
from tests.unit.probe_builder import recordings


@dataclass
class Draft:
    """A run that is not written yet. `metrics` and `trajectory` follow from the rest when they are still empty."""

    plan: Plan
    manifest: dict[str, Any]
    ray: RayStatus
    steps: list[Step]
    fingerprints: list[Fingerprints]
    metrics: list[Metrics] = field(default_factory=list)
    trajectory: list[TrajectoryLine] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    probes: list[list[Probe]] = field(default_factory=list)
    plan_text: str | None = None

    def made(self, number: int) -> Made:
        """What a step made, as the trajectory takes it."""
        return Made(self.updates[number], self.fingerprints[number + 1], self.plan.config.seed)


Change = Callable[[Draft], None]


def make_plan(**options: Any) -> Plan:
    """The plan of the small run; options replace those of its config."""
    profile = Profile(
        name="small",
        device="cpu",
        ranks=4,
        model="model",
        prompts="prompts.jsonl",
        max_prompt_len=4,
        prompts_per_step=2,
        samples_per_prompt=2,
        engine=EngineLimits(kv_cache_bytes=1 << 20, max_num_seqs=8, max_num_batched_tokens=8),
    )
    shape = ModelShape(
        layers=1,
        hidden=32,
        intermediate=16,
        heads=8,
        kv_heads=8,
        head_dim=4,
        vocab_size=40,
        max_positions=64,
        rms_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=False,
        eos_ids=(EOS,),
    )
    config: dict[str, Any] = {
        "tp": 2,
        "rollout_tp": 2,
        "mix": "0.7/0.95,0,1.0,1.3/0.99/20",
        "max_response_len": 6,
        "run_id": "small-run",
    }
    return derive(RunConfig(**{**config, **options}), profile, shape)


def make_draft(lengths: Sequence[int] = LENGTHS, **options: Any) -> Draft:
    """A run that passes, with responses of these lengths; options replace those of its config."""
    plan = make_plan(**options)
    steps = [make_step(plan, number, lengths) for number in range(plan.config.steps)]
    versions = [make_fingerprints(plan, version) for version in range(plan.config.steps + 1)]
    updates = [make_update(plan, number) for number in range(plan.config.steps)]
    return draft_of(plan, steps, versions, updates)


def draft_of(
    plan: Plan,
    steps: list[Step],
    versions: list[Fingerprints],
    updates: list[Update],
    probes: list[list[Probe]] | None = None,
) -> Draft:
    """A run of these arrays and weights whose processes all did what the plan asks for; probes are made up where none
    are given."""
    if probes is None:
        probes = [_probes(plan, step) for step in steps] if plan.config.probe else []
    roles = layout.roles(plan.ranks, plan.engines, plan.engine_ranks)
    actors = tuple(Actor(role, "DEAD", 100 + number, "INTENDED_USER_EXIT") for number, role in enumerate(roles))
    ray = RayStatus("SUCCEEDED", actors)
    return Draft(plan, manifest_fields(plan, roles), ray, steps, versions, updates=updates, probes=probes)


def build(
    root: Path,
    *,
    before: Change | None = None,
    after: Change | None = None,
    disk: Callable[[Path], None] | None = None,
    **options: Any,
) -> tuple[Path, Validation]:
    """Write, seal and validate a run below `root`.

    `before` changes the draft before metrics and trajectory follow from it, `after` afterwards; `disk` changes the
    directory before the verdict and the seal.
    """
    return write(root, make_draft(**options), before=before, after=after, disk=disk)


def write(
    root: Path,
    draft: Draft,
    *,
    before: Change | None = None,
    after: Change | None = None,
    disk: Callable[[Path], None] | None = None,
    sealed: bool = True,
) -> tuple[Path, Validation]:
    """As `build`, from a draft; without a seal the verdict is on the content alone."""
    complete(draft, before, after)
    writer = RunWriter.create(root, draft.plan.run_id)
    _write(writer, draft)
    if disk:
        disk(writer.run_dir)
    if sealed:
        return writer.run_dir, writer.finish(Manifest(**draft.manifest), draft.ray)
    writer.manifest(Manifest(**draft.manifest))
    files.write_new(writer.run_dir / layout.RAY_STATUS, draft.ray.to_text().encode())
    return writer.run_dir, validate_record(writer.run_dir)


def complete(draft: Draft, before: Change | None = None, after: Change | None = None) -> Draft:
    """Metrics, trajectory and oracle that follow from the rest, and the changes before and after."""
    if before:
        before(draft)
    draft.metrics = [_metrics(draft.plan, number, step) for number, step in enumerate(draft.steps)]
    draft.trajectory = _trajectory(draft)
    for number, step in enumerate(draft.steps):
        step.oracle = step.oracle or oracle_columns(draft.plan, number, step)
    if after:
        after(draft)
    return draft


def red(validation: Validation) -> set[str]:
    """Names of the checks that failed."""
    return {check.name for check in validation.checks if not check.passed}


def _write(writer: RunWriter, draft: Draft) -> None:
    writer.manifest(Manifest(**{**draft.manifest, "status": "running"}))
    if draft.plan_text is None:
        writer.plan(draft.plan)
    else:
        files.write_new(writer.run_dir / layout.PLAN, draft.plan_text.encode())
    for number, step in enumerate(draft.steps):
        for engine, columns in enumerate(step.rollouts):
            writer.rollout(number, engine, RolloutArrays(**columns))
        for rank, columns in enumerate(step.trains):
            cp = draft.plan.train.cp
            writer.train(number, rank // cp, rank % cp, cp, TrainArrays(**columns))
        writer.batch(number, BatchArrays(**step.batch))
        if step.oracle:
            writer.oracle(number, weights_hash(draft.fingerprints[number].trainer), OracleArrays(**step.oracle))
    for update in draft.updates:
        writer.update(update)
    for number, recorded in enumerate(draft.probes):
        for probe in recorded:
            writer.probe(number, probe)
    for version in draft.fingerprints:
        writer.fingerprints(version)
    for metrics in draft.metrics:
        writer.metrics(metrics)
    for line in draft.trajectory:
        files.append_line(writer.run_dir / layout.TRAJECTORY, line.to_json())
    writer.log.write_text("step 0\nstep 1\n")


def _metrics(plan: Plan, number: int, step: Step) -> Metrics:
    samples = step.samples
    counts = asdict(batch_counts(samples, BatchArrays(**step.batch)))
    generated = tuple(
        Generated(samples=len(own["sample_id"]), tokens=len(own["tokens"]), chunks=2, cached_tokens=0, preemptions=0)
        for own in step.rollouts
    )
    return Metrics(
        step=number,
        loss=0.25,
        policy_loss=0.125,
        kl=0.5,
        grad_norm=0.75,
        lr=plan.config.lr,
        clip_fraction=0.0,
        clip_factor=1.0,
        weight_version=number,
        rollout_logprobs_reused=False,
        generated=generated,
        engine_ranks_agree=(True,) * plan.engines,
        seconds=Seconds(rollout=1.0, score=1.0, train=1.0, sync=1.0, total=4.0),
        **counts,
    )


def _trajectory(draft: Draft) -> list[TrajectoryLine]:
    lines: list[TrajectoryLine] = []
    for number, step in enumerate(draft.steps):
        samples = step.samples
        previous = lines[-1].digest if lines else START
        lines.append(trajectory_line(number, samples, BatchArrays(**step.batch), draft.made(number), previous))
    return lines


def _probes(plan: Plan, step: Step) -> list[Probe]:
    samples = step.samples
    ids, prompts = samples.sample_id.tolist(), samples.prompt_len.tolist()
    lengths = (samples.prompt_len + samples.response_len).tolist()
    return recordings(plan, dict(zip(ids, prompts, strict=True)), dict(zip(ids, lengths, strict=True)))
