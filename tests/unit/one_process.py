"""A whole step in one process: two engines that decode from pages, and a trainer whose ranks are threads.

What vLLM and Ray add is left out; model, sampler, trainer, evidence and verdict are the product's own. So a fault of
the operators, the sampler or the trainer goes to the verdict in about a second. Sizes: 8 samples of 4 prompts and at
most 12 new tokens, four samplings mixed, TP 2 x CP 2 in the trainer and TP 2 in the engines: the least that has
neighbours in a batch, a second page, a second rank of every group and each rule of sampling. Rules of sampling are the
same on every rank: two ranks are enough for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk.driver.oracle import Oracle
from rlk.driver.sync import fingerprint_record, tensor_entries, update_record
from rlk.evidence.arrays import LENGTH, STOP, RolloutArrays
from rlk.evidence.layout import engine_role, train_role
from rlk.evidence.probe import Probe
from rlk.evidence.samples import merge
from rlk.evidence.schemas import Fingerprints
from rlk.evidence.verdict import Validation
from rlk.kernels import attention, policy
from rlk.kernels.policy import RowParams
from rlk.model import checkpoint
from rlk.model.faults import ops_for, policy_for
from rlk.model.parallel import ParallelContext
from rlk.model.policy_probe import ProbedPolicy
from rlk.model.probe import ProbedOps, Recorder
from rlk.model.qwen3 import Qwen3
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.faults import injection
from rlk.plan.profile import load_profile
from rlk.plan.shape import read_shape
from rlk.train.batching import Sample
from rlk.train.data import PromptSet
from rlk.train.worker import TrainWorker
from tests.unit.evidence_builder import draft_of, write
from tests.unit.evidence_steps import Step
from tests.unit.ranks import on_ranks

ROOT = Path(__file__).parents[2]
MIX = "0.7/0.5,2,1.3/0.9/6,1/1/3"
BLOCK, PAGES, NEW = 16, 8, 12


def make_plan(inject: str | None = None, **options: Any) -> Plan:
    """The tiny model on four ranks, unless `ranks` says fewer; `samples` of each prompt."""
    own = {"ranks": options.pop("ranks", 4), "samples_per_prompt": options.pop("samples", 2)}
    profile = load_profile("tiny-cpu", ROOT).model_copy(update=own)
    config = {"command": "run", "steps": 1, "tp": 2, "rollout_tp": 2, "mix": MIX, "max_response_len": NEW, "lr": 1e-4}
    config |= {"run_id": "one-process", "inject": inject, "probe": True, **options}
    return derive(RunConfig(**config), profile, read_shape(Path(profile.model)))


class Engine:
    """One engine of a step: prefill, then one token a sample at a time, over pages of keys and values."""

    def __init__(self, plan: Plan, context: ParallelContext, engine: int) -> None:
        inject = plan.config.inject
        if engine > 0 and inject is not None and injection(inject).fault.side != "both":
            inject = None  # as the engines do: a fault of one side acts in engine 0
        ops, _ = ops_for(inject, "rollout", "both")
        self.recorder = Recorder(context, plan.shape.layers, native=False)
        self.policy, _ = policy_for(inject, "rollout", "both", inner=ProbedPolicy(policy, self.recorder))
        self.plan = plan
        self.model = Qwen3(plan.shape, context, ProbedOps(ops, self.recorder), plan.max_model_len)
        self.model.load(checkpoint.load(Path(plan.profile.model), self.model.params, context))
        heads = plan.shape.kv_heads // plan.rollout.tp
        shape = (PAGES * 8, heads, BLOCK, 2 * plan.shape.head_dim)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(plan.shape.layers)]

    def generate(self, prompts: Sequence[Sequence[int]], first: int) -> tuple[list[list[int]], list[list[float]]]:
        """Responses and log-probabilities of samples first, first + 1, ..."""
        n, vocabulary = len(prompts), self.plan.shape.vocab_size
        table = torch.arange(n * PAGES, dtype=torch.int32).view(n, PAGES)
        rows, done = [list(p) for p in prompts], [False] * n
        logprobs: list[list[float]] = [[] for _ in prompts]
        known = [0] * n
        samplings = [self.plan.sampling_of(first + i) for i in range(n)]
        params = RowParams.build([(s.temperature, s.top_p, s.top_k) for s in samplings], vocabulary)
        for _ in range(self.plan.config.max_response_len):
            live = [i for i in range(n) if not done[i]]
            ids = torch.tensor([first + i for i in live])
            logits = self._forward([rows[i][known[i] :] for i in live], [known[i] for i in live], table[live], ids)
            position = torch.tensor([len(rows[i]) for i in live])
            seed = torch.full_like(ids, self.plan.config.seed)
            tokens, found = self.policy.sample_rows(logits, params.rows(torch.tensor(live)), seed, ids, position)
            for i, token, logprob in zip(live, tokens.tolist(), found.tolist(), strict=True):
                known[i] = len(rows[i])
                rows[i].append(token)
                logprobs[i].append(logprob)
                done[i] = token in self.plan.shape.eos_ids
            if all(done):
                break
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)], logprobs

    def _forward(self, new: list[list[int]], known: list[int], table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last row of each request."""
        lengths = torch.tensor([len(one) for one in new])
        first = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        positions = torch.cat([torch.arange(k, k + len(one)) for k, one in zip(known, new, strict=True)])
        owner = torch.repeat_interleave(torch.arange(len(new)), lengths)
        slots = table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        seq_lens = (torch.tensor(known) + lengths).int()

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            attention.write_pages(k, v, self.caches[layer], slots)
            return attention.paged(q, self.caches[layer], table.contiguous(), first.int(), seq_lens)

        self.recorder.begin("rollout", ids[owner], positions, first[1:] - 1)
        hidden = self.model.forward(torch.tensor([t for one in new for t in one]), positions, attend)
        return self.model.logits(hidden[first[1:] - 1])


def run(root: Path, inject: str | None = None, **options: Any) -> tuple[Validation, Fingerprints]:
    """One step with a fault, judged; and the fingerprints of the weights that it made."""
    plan = make_plan(inject, **options)
    data = PromptSet(
        Path(plan.profile.prompts), Path(plan.profile.model) / "tokenizer.json", plan.profile.max_prompt_len
    )
    drawn = data.batch(0, plan.prompts_per_step, plan.config.seed)
    prompts = [prompt for prompt in drawn for _ in range(plan.samples_per_prompt)]
    half = len(prompts) // plan.engines
    generated = [
        _generated(plan, engine, prompts[engine * half : (engine + 1) * half], engine * half)
        for engine in range(plan.engines)
    ]
    rollouts = [columns for columns, _ in generated]
    samples = merge([RolloutArrays(**columns) for columns in rollouts])
    batch = [
        Sample(
            i, (*samples.prompt(i).tolist(), *samples.tokens[samples.response(i)].tolist()), int(n), plan.sampling_of(i)
        )
        for i, n in enumerate(samples.prompt_len.tolist())
    ]
    reward = np.arange(len(batch), dtype=np.float64) % 2
    coefficients = {s.sample_id: np.full(s.response_len, 0.01 * (s.sample_id % 3 - 1), np.float32) for s in batch}

    def train(context: ParallelContext) -> tuple[Any, ...]:
        worker = TrainWorker(plan, context)
        before, described, exported = worker.fingerprints(), worker.described(), dict(worker.model.weights)
        exported = {name: weight.clone().view(torch.uint16).numpy() for name, weight in exported.items()}
        worker.begin(batch)
        scored, reference = worker.score(), worker.score_reference()
        updated, _ = worker.update(coefficients)
        made = worker.fingerprints(), worker.update_fingerprints()
        role = train_role(context.tp.rank * context.cp.size + context.cp.rank)
        return before, described, exported, scored, reference, updated, *made, Probe(role, *worker.take_probe())

    ranks = on_ranks(plan.train.tp, plan.train.cp, train)
    holders = ranks[:: plan.train.cp]
    tensors = tensor_entries(plan, [rank[1] for rank in holders])
    versions = [_weights(plan, version, tensors, [rank[at] for rank in ranks]) for version, at in ((0, 0), (1, 6))]
    oracle = Oracle(plan)
    oracle.load([rank[2] for rank in holders])
    step = Step(
        rollouts,
        [_scored(*rank[3:6]) for rank in ranks],
        {"sample_id": samples.sample_id, "reward": reward, "advantage": reward - 0.5},
        oracle.look(0, samples).columns(),
    )
    update = update_record(plan, 0, [rank[7] for rank in ranks])
    probes = [*(probe for _, own in generated for probe in own), *(rank[8] for rank in ranks)]

    _, verdict = write(root, draft_of(plan, [step], versions, [update], [probes]), sealed=False)
    return verdict, versions[1]


_CLEAN: dict[str, tuple[dict[str, np.ndarray], list[Probe]]] = {}


def _generated(
    plan: Plan, engine: int, prompts: Sequence[Any], first: int
) -> tuple[dict[str, np.ndarray], list[Probe]]:
    """What one engine makes; what it makes without a fault is made once for all runs of the same options."""
    fault = None if plan.config.inject is None else injection(plan.config.inject).fault
    if fault is not None and (fault.side == "both" or (fault.side == "rollout" and engine == 0)):
        return _rollout(plan, engine, prompts, first)
    key = f"{engine} {plan.config.model_copy(update={'inject': None}).model_dump_json()} {plan.samples_per_prompt}"
    if key not in _CLEAN:
        _CLEAN[key] = _rollout(plan, engine, prompts, first)
    columns, probes = _CLEAN[key]
    return {name: column.copy() for name, column in columns.items()}, probes


def _rollout(plan: Plan, engine: int, prompts: Sequence[Any], first: int) -> tuple[dict[str, np.ndarray], list[Probe]]:
    tokens = [prompt.tokens for prompt in prompts]

    def generate(context: ParallelContext) -> tuple[list[list[int]], list[list[float]], Probe]:
        one = Engine(plan, context, engine)
        drawn = one.generate(tokens, first)
        role = engine_role(engine, context.tp.rank)
        return *drawn, Probe(role, context.shards.start, 0, one.recorder.take())

    both = on_ranks(plan.rollout.tp, 1, generate)
    assert all(one[:2] == both[0][:2] for one in both), "the ranks of an engine drew different tokens"
    responses, logprobs, _ = both[0]
    n, settings = len(tokens), [plan.sampling_of(first + i) for i in range(len(tokens))]
    columns = {
        "sample_id": np.arange(first, first + n),
        "prompt_index": np.array([prompt.index for prompt in prompts]),
        "prompt_len": np.array([len(t) for t in tokens], np.int32),
        "response_len": np.array([len(r) for r in responses], np.int32),
        "prompt_tokens": np.concatenate([np.array(t, np.int32) for t in tokens]),
        "tokens": np.concatenate([np.array(r, np.int32) for r in responses]),
        "mask": np.ones(sum(map(len, responses)), np.uint8),
        "logprobs": np.concatenate([np.array(x, np.float32) for x in logprobs]),
        "temperature": np.array([s.temperature for s in settings]),
        "top_p": np.array([s.top_p for s in settings]),
        "top_k": np.array([s.top_k for s in settings]),
        "finish_reason": np.array([STOP if r[-1] in plan.shape.eos_ids else LENGTH for r in responses], np.uint8),
        "weight_version": np.zeros(n, np.int64),
        "cached_tokens": np.zeros(n, np.int64),
    }
    return columns, [rank[2] for rank in both]


def _scored(scored: Any, reference: np.ndarray, updated: np.ndarray) -> dict[str, np.ndarray]:
    columns = {name: getattr(scored, name) for name in ("sample_id", "index", "token", "logprob")}
    return {**columns, "update_logprob": updated, "ref_logprob": reference, "in_support": scored.in_support}


def _weights(plan: Plan, version: int, tensors: Any, ranks: Sequence[Any]) -> Fingerprints:
    """Engines that hold what the trainer holds: faults of the synchronisation are shown with live engines."""
    trainer = fingerprint_record(plan, version, tensors, ranks, [])
    return trainer.model_copy(update={"engines": (trainer.trainer,) * plan.engines})
