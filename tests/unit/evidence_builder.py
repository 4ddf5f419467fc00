"""Makes a small valid run directory in plain numpy, with places to break it.

2 steps, 2 engines of 2 ranks, 4 train ranks (TP2 x CP2), 4 samples a step in 2 groups: the least at which every
check has something to compare: replicas, shards, a second engine, a second weight version, and each kind of
sampling (nucleus, greedy, full support, all three cuts). Samples alternate between engines and stand in them in
descending order, so that nothing passes by keeping the order of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlk.evidence import files, layout
from rlk.evidence.arrays import LENGTH, STOP, BatchArrays, OracleArrays, RolloutArrays, TrainArrays
from rlk.evidence.counts import batch_counts
from rlk.evidence.digest import START, Made, trajectory_line, weights_hash
from rlk.evidence.oracle import looked_at, uniform
from rlk.evidence.plans import derived_record, topology_record
from rlk.evidence.probe import Probe
from rlk.evidence.program import parameters
from rlk.evidence.ray_status import Actor, RayStatus
from rlk.evidence.samples import merge
from rlk.evidence.schemas import (
    GREEDY_CONVENTION,
    KL_CONVENTION,
    EngineReadback,
    Fingerprints,
    Generated,
    Kernel,
    Manifest,
    Memory,
    Metrics,
    Process,
    Readback,
    Repository,
    Requested,
    Seconds,
    TrainReadback,
    TrajectoryLine,
    Update,
)
from rlk.evidence.settings import requested_engine, requested_train
from rlk.evidence.tensors import expected_tensors
from rlk.evidence.validate import validate_record
from rlk.evidence.verdict import Validation
from rlk.evidence.writer import RunWriter
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.profile import EngineLimits, Profile
from rlk.plan.shape import ModelShape
from tests.unit.probe_builder import recordings

EOS = 1
KERNELS = {"gemm": "loop", "attention": "loop"}


@dataclass
class Step:
    """The arrays of one step as dictionaries of columns, free to be changed. The oracle's follow from the rest."""

    rollouts: list[dict[str, np.ndarray]]
    trains: list[dict[str, np.ndarray]]
    batch: dict[str, np.ndarray]
    oracle: dict[str, np.ndarray] = field(default_factory=dict)


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


def make_draft(**options: Any) -> Draft:
    """A run that passes; options replace those of its config."""
    plan = make_plan(**options)
    steps = [_step(plan, number) for number in range(plan.config.steps)]
    versions = [_fingerprints(plan, version) for version in range(plan.config.steps + 1)]
    updates = [_update(plan, number) for number in range(plan.config.steps)]
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
    return Draft(plan, _manifest(plan, roles), ray, steps, versions, updates=updates, probes=probes)


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
    if before:
        before(draft)
    draft.metrics = [_metrics(draft.plan, number, step) for number, step in enumerate(draft.steps)]
    draft.trajectory = _trajectory(draft)
    for number, step in enumerate(draft.steps):
        step.oracle = step.oracle or _oracle(draft.plan, number, step)
    if after:
        after(draft)
    writer = RunWriter.create(root, draft.plan.run_id)
    _write(writer, draft)
    if disk:
        disk(writer.run_dir)
    if sealed:
        return writer.run_dir, writer.finish(Manifest(**draft.manifest), draft.ray)
    writer.manifest(Manifest(**draft.manifest))
    files.write_new(writer.run_dir / layout.RAY_STATUS, draft.ray.to_text().encode())
    return writer.run_dir, validate_record(writer.run_dir)


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


def _step(plan: Plan, number: int) -> Step:
    """Samples of 6 (cut off), 3, 4 and 5 tokens; the first prompt of a step has 2 tokens, the second 3."""
    random = np.random.default_rng(number)
    ids = np.arange(plan.samples_per_step) + number * plan.samples_per_step
    samples = []
    for index, sample in enumerate(ids.tolist()):
        group = index // plan.samples_per_prompt
        tokens = random.integers(2, plan.shape.vocab_size, (6, 3, 4, 5)[index % 4]).astype(np.int32)
        cut = len(tokens) == plan.config.max_response_len
        if not cut:
            tokens[-1] = EOS
        sampling = plan.sampling_of(index)
        samples.append(
            {
                "sample_id": np.array([sample], np.int64),
                "prompt_index": np.array([number * plan.prompts_per_step + group], np.int64),
                "prompt_len": np.array([2 + group], np.int32),
                "response_len": np.array([len(tokens)], np.int32),
                "prompt_tokens": np.arange(2 + group, dtype=np.int32) + 10 * group + 2,
                "tokens": tokens,
                "mask": np.ones(len(tokens), np.uint8),
                "logprobs": -random.random(len(tokens)).astype(np.float32) - np.float32(0.01),
                "temperature": np.array([sampling.temperature]),
                "top_p": np.array([sampling.top_p]),
                "top_k": np.array([sampling.top_k], np.int64),
                "finish_reason": np.array([LENGTH if cut else STOP], np.uint8),
                "weight_version": np.array([number], np.int64),
                "cached_tokens": np.array([0], np.int64),
            }
        )
    engines = [samples[engine :: plan.engines][::-1] for engine in range(plan.engines)]
    rollouts = [{name: np.concatenate([one[name] for one in own]) for name in own[0]} for own in engines]
    trains = [_train(samples, rank % plan.train.cp, plan.train.cp, random) for rank in range(plan.train.cp)]
    replicas = [{k: v.copy() for k, v in trains[rank % plan.train.cp].items()} for rank in range(plan.ranks)]
    rewards = np.array([1.0, 0.0, 0.0, 1.0])[: len(ids)]
    batch = {"sample_id": ids.astype(np.int64), "reward": rewards, "advantage": rewards - 0.5}
    return Step(rollouts, replicas, batch)


def _train(
    samples: list[dict[str, np.ndarray]], cp_rank: int, cp: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """The rows of one CP rank: every cp-th token of each sample, last sample first."""
    parts = []
    for sample in reversed(samples):
        index = np.arange(cp_rank, len(sample["tokens"]), cp, dtype=np.int32)
        parts.append(
            {
                "sample_id": np.full(len(index), sample["sample_id"][0]),
                "index": index,
                "token": sample["tokens"][index],
                "logprob": sample["logprobs"][index],
                "update_logprob": sample["logprobs"][index],
                "ref_logprob": -random.random(len(index)).astype(np.float32) - np.float32(0.01),
                "in_support": np.ones(len(index), np.uint8),
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _metrics(plan: Plan, number: int, step: Step) -> Metrics:
    samples = merge([RolloutArrays(**columns) for columns in step.rollouts])
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


def _oracle(plan: Plan, number: int, step: Step) -> dict[str, np.ndarray]:
    """An oracle that says what the rollout says; 12 / 256 * (1 - p) is allowed at T = 1."""
    samples = merge([RolloutArrays(**columns) for columns in step.rollouts])
    pairs = looked_at(number, samples.logprobs_by_row(), len(plan.config.samplings))
    rows = np.array([row for row, _ in pairs])
    at = samples.response_start[rows] + np.array([index for _, index in pairs])
    settings = [plan.sampling_of(int(i) - number * plan.samples_per_step) for i in samples.sample_id[rows]]
    positions = samples.prompt_len[rows] + samples.index[at]
    keys = zip(samples.sample_id[rows].tolist(), positions.tolist(), strict=True)
    logprob = samples.logprobs[at].astype(np.float64)
    return {
        "sample_id": samples.sample_id[rows],
        "index": samples.index[at],
        "token": samples.tokens[at].astype(np.int64),
        "temperature": np.array([s.temperature for s in settings]),
        "top_p": np.array([s.top_p for s in settings]),
        "top_k": np.array([s.top_k for s in settings], np.int64),
        "logprob": logprob,
        "least": logprob.copy(),
        "most": logprob.copy(),
        "scale": np.ones(len(rows)),
        "reachable": np.ones(len(rows), np.uint8),
        "below": np.zeros(len(rows)),
        "through": np.ones(len(rows)),
        "draw": np.array([uniform(plan.config.seed, *one) for one in keys]),
    }


def _trajectory(draft: Draft) -> list[TrajectoryLine]:
    lines: list[TrajectoryLine] = []
    for number, step in enumerate(draft.steps):
        samples = merge([RolloutArrays(**columns) for columns in step.rollouts])
        previous = lines[-1].digest if lines else START
        lines.append(trajectory_line(number, samples, BatchArrays(**step.batch), draft.made(number), previous))
    return lines


def _probes(plan: Plan, step: Step) -> list[Probe]:
    samples = merge([RolloutArrays(**columns) for columns in step.rollouts])
    ids, prompts = samples.sample_id.tolist(), samples.prompt_len.tolist()
    lengths = (samples.prompt_len + samples.response_len).tolist()
    return recordings(plan, dict(zip(ids, prompts, strict=True)), dict(zip(ids, lengths, strict=True)))


def _update(plan: Plan, number: int) -> Update:
    names = list(parameters(plan.shape.layers, tied=plan.shape.tie_word_embeddings))

    def hashes(kind: str) -> dict[str, str]:
        words = {name: hashlib.sha256(f"{kind} {name} {number}".encode()).hexdigest() for name in names}
        return {name: f"{word[:16]}:{word[16:32]}" for name, word in words.items()}

    fields = {kind: hashes(kind) for kind in ("gradients", "masters", "first_moments", "second_moments")}
    return Update(step=number, replicas_agree=True, **fields)


def _fingerprints(plan: Plan, version: int) -> Fingerprints:
    """One-dimensional tensors stay, the others change with every version."""
    tensors = expected_tensors(plan.shape)
    hashes = {}
    for entry in tensors:
        text = f"{entry.name} {version if len(entry.shape) > 1 else 0}"
        word = hashlib.sha256(text.encode()).hexdigest()
        hashes[entry.name] = f"{word[:16]}:{word[16:32]}"
    engines = tuple(dict(hashes) for _ in range(plan.engines))
    return Fingerprints(version=version, tensors=tensors, trainer=hashes, trainer_replicas_agree=True, engines=engines)


def _manifest(plan: Plan, roles: tuple[str, ...]) -> dict[str, Any]:
    pids = {role: 100 + number for number, role in enumerate(roles)}
    train = tuple(
        TrainReadback(pid=pids[layout.train_role(rank)], kernels=KERNELS, **requested_train(plan, rank))
        for rank in range(plan.ranks)
    )
    engines = tuple(
        tuple(
            EngineReadback(
                pid=pids[layout.engine_role(engine, rank)], kernels=KERNELS, **requested_engine(plan, engine, rank)
            )
            for rank in range(plan.engine_ranks)
        )
        for engine in range(plan.engines)
    )
    return {
        "run_id": plan.run_id,
        "command": plan.config.command,
        "arguments": ("verify",),
        "mode": plan.config.mode,
        "created": "2026-01-01T00:00:00Z",
        "status": "complete",
        "error": None,
        "requested": {name: Requested(**one) for name, one in plan.requested().items()},
        "effective": plan.effective(),
        "topology": topology_record(plan),
        "derived": derived_record(plan),
        "profile": plan.profile.name,
        "kernels": tuple(Kernel(name=name, form=form, proof="fixed loop order") for name, form in KERNELS.items()),
        "versions": {"numpy": np.__version__},
        "repository": Repository(revision=None, dirty=True, patch_sha256=None),
        "runtime": {},
        "memory": Memory(offload=plan.offload, reason="the training state fits beside the engines"),
        "kl_convention": KL_CONVENTION,
        "greedy_convention": GREEDY_CONVENTION,
        "readback": Readback(train=train, engines=engines),
        "processes": tuple(Process(pid=pid, started=1.0, role=role) for role, pid in pids.items()),
        "actors_outlive_run": False,
        "notes": (),
    }
