"""Config, profile and model shape make a plan: everything a run needs to know, by a pure function."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlk.plan.config import RunConfig
from rlk.plan.environment import engine_environment, train_environment
from rlk.plan.errors import ConfigErrors
from rlk.plan.faults import injection
from rlk.plan.naming import cell_id, command_line
from rlk.plan.profile import Profile
from rlk.plan.rules import Case, check, not_built
from rlk.plan.sampling import Sampling
from rlk.plan.shape import ModelShape
from rlk.plan.topology import Topology

SCHEMA: Literal["rlk.plan/1"] = "rlk.plan/1"
LOGICAL_BUDGET = 1024
"""Tokens of a micro-batch over all CP ranks, unless --max-tokens-per-gpu says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run. Sample i of a step's batch belongs to prompt i // samples_per_prompt of that step."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    schema: Literal["rlk.plan/1"] = SCHEMA
    config: RunConfig
    profile: Profile
    shape: ModelShape
    cell: str
    """Id of this topology and sampling; part of the default run id."""
    train: Topology
    rollout: Topology
    ranks: int
    engines: int
    engine_ranks: int
    """Ranks of one engine."""
    engine_cap: str | None
    """The sentence that says why there are fewer engines than ranks would allow."""
    token_budget: int
    """Tokens a rank per micro-batch; a sample is never split, so a longer one is a micro-batch of its own."""
    logical_budget: int
    """Tokens of a micro-batch over the CP ranks."""
    transport: Literal["shared-memory", "host-staged", "cuda-ipc"]
    """How ranks of a group exchange bytes."""
    graph_sizes: tuple[int, ...]
    """Batch sizes of the captured CUDA graphs; empty on a CPU, and where a step meets the host."""
    padded_vocab: int
    prompts_per_step: int
    samples_per_prompt: int
    baseline: Literal["group", "batch"]
    """Whose mean reward is subtracted: the prompt's samples, or all samples where a prompt has one only."""
    offload: bool
    """Whether train state leaves the GPU during rollout."""
    max_model_len: int
    train_env: dict[str, str]
    engine_env: dict[str, str]
    commands: tuple[str, ...]
    """The equivalent command lines with every value expanded."""
    notes: tuple[str, ...]
    """Sentences about decisions that the settings alone do not show; for the manifest."""
    unbuilt: tuple[str, ...]
    """What this version cannot run of it; `verify` and `run` refuse a plan that has any."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one step's batch."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def run_id(self) -> str:
        """Name of the run directory; raises ValueError while none is chosen."""
        if self.config.run_id is None:
            raise ValueError("this plan has no run id yet: use with_run_id")
        return self.config.run_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a response."""
        return () if self.config.ignore_eos else self.shape.eos_ids

    def sampling_of(self, index_in_batch: int) -> Sampling:
        """The sampling of one sample; a mix is cycled by the sample's index in its step's batch."""
        samplings = self.config.samplings
        return samplings[index_in_batch % len(samplings)]

    def with_run_id(self, run_id: str) -> Plan:
        """The same plan under a run id."""
        return derive(self.config.model_copy(update={"run_id": run_id}), self.profile, self.shape)

    def requested(self) -> dict[str, dict[str, object]]:
        """Every option: the value asked for and its source (command line, environment, profile or default)."""
        return self.config.requested()

    def effective(self) -> dict[str, object]:
        """Every option's value in force, in JSON types, with what was left out filled in."""
        values: dict[str, object] = self.config.model_dump(mode="json", exclude={"command", "sources"})
        if self.config.mix is not None:
            values.update(temperature=None, top_p=None, top_k=None)  # replaced by the mix
        values.update(prompts_per_step=self.prompts_per_step, samples_per_prompt=self.samples_per_prompt)
        values.update(cp=self.train.cp, max_tokens_per_gpu=self.token_budget)
        return {**values, "profile": self.profile.origin or self.config.profile}

    def to_json(self) -> str:
        """One JSON object; `from_json` gives back an equal plan, and the same text again."""
        return _ADAPTER.dump_json(self, indent=2).decode()

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; raises ConfigErrors for anything else."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            raise ConfigErrors(f"plan: {'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults) from error


def derive(config: RunConfig, profile: Profile, shape: ModelShape) -> Plan:
    """The plan of these three; the same for the same input on every machine. Raises ConfigErrors with all errors."""
    errors = check(Case(config, profile, shape))
    if errors:
        raise ConfigErrors(errors)
    train = Topology(config.tp, profile.ranks // config.tp)
    rollout = Topology(config.rollout_tp, config.rollout_cp)
    engines, cap = _engines(profile, rollout)
    budget = config.max_tokens_per_gpu or LOGICAL_BUDGET // train.cp
    prompts = config.prompts_per_step or profile.prompts_per_step
    alike = all(sampling.greedy for sampling in config.samplings)
    samples = config.samples_per_prompt or (1 if alike else profile.samples_per_prompt)
    plan = Plan(
        config=config,
        profile=profile,
        shape=shape,
        cell=cell_id(config, train, rollout),
        train=train,
        rollout=rollout,
        ranks=profile.ranks,
        engines=engines,
        engine_ranks=rollout.ranks,
        engine_cap=cap,
        token_budget=budget,
        logical_budget=budget * train.cp,
        transport=_transport(profile),
        graph_sizes=_graph_sizes(config, profile, prompts * samples, engines),
        padded_vocab=shape.padded_vocab,
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        baseline="batch" if samples == 1 else "group",
        offload=profile.device == "cuda" and train.tp == 1 and rollout.tp == 1,
        max_model_len=profile.max_prompt_len + config.max_response_len,
        train_env=train_environment(profile.device),
        engine_env=engine_environment(profile.device),
        commands=(),
        notes=(),
        unbuilt=tuple(not_built(config, profile)),
    )
    return dataclasses.replace(plan, commands=(command_line(config, plan.effective()),), notes=_notes(plan))


def _engines(profile: Profile, rollout: Topology) -> tuple[int, str | None]:
    """How many engines fit the ranks and the profile, and why fewer than the ranks would allow."""
    fitting, allowed = profile.ranks // rollout.ranks, profile.engine.max_engines
    if fitting <= allowed:
        return fitting, None
    return allowed, f"{allowed} of {fitting} engines: profile {profile.name} allows at most {allowed}"


def _graph_sizes(config: RunConfig, profile: Profile, samples: int, engines: int) -> tuple[int, ...]:
    """Decode batch sizes to capture: 1, 2, 4, then multiples of 8, up to what one engine can have in flight."""
    if profile.device != "cuda" or _eager(config, profile):
        return ()
    most = min(profile.engine.max_num_seqs, -(-samples // engines))
    return tuple(sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most}))


def _transport(profile: Profile) -> Literal["shared-memory", "host-staged", "cuda-ipc"]:
    if profile.collectives == "cuda-ipc":
        return "cuda-ipc"
    return "shared-memory" if profile.device == "cpu" else "host-staged"


def _eager(config: RunConfig, profile: Profile) -> str | None:
    """Why no step of an engine on a GPU can be captured in a graph, or None."""
    if config.rollout_tp > 1 and profile.collectives == "host":
        return "its ranks exchange bytes through the host"
    if config.rollout_cp > 1:
        return "which pages a step takes from other ranks is found on the host"
    if config.inject is not None:
        return "a fault on purpose acts between ops"
    if config.probe:
        return "a probe reads what every op returns"
    if config.mode == "native":
        return "native attention looks at lengths on the host"
    return None


def _notes(plan: Plan) -> tuple[str, ...]:
    shape, config = plan.shape, plan.config
    known = "" if shape.tokenizer_len is None else f"; the tokenizer knows {shape.tokenizer_len} of them"
    notes = [f"The real vocabulary is the model's {shape.vocab_size} ids{known}; padded to {plan.padded_vocab} rows."]
    if any(sampling.greedy for sampling in config.samplings):
        notes.append("Greedy samples ignore top-p and top-k in both engines; their log-prob is the untempered one.")
    if plan.samples_per_prompt == 1:
        notes.append("One sample a prompt: the baseline of the advantages is the mean reward of the batch.")
    if plan.engine_cap is not None:
        notes.append(f"{plan.engine_cap}.")
    if plan.offload:
        notes.append("Train state is offloaded during rollout: train TP and rollout TP are both 1.")
    if plan.profile.device == "cuda" and (reason := _eager(config, plan.profile)):
        notes.append(f"No decode step of an engine is captured in a CUDA graph: {reason}.")
    if plan.profile.reward == "parity":
        notes.append("The reward is 1 where the token ids of a response have an even sum: the model knows no answer.")
    if plan.max_model_len > plan.logical_budget:
        notes.append(f"A sample above {plan.logical_budget} tokens is a micro-batch of its own.")
    if config.inject is not None:
        sentence = injection(config.inject).sentence
        notes.append(f"{sentence[0].upper()}{sentence[1:]}.")
    if config.mode == "native":
        notes.append("Native mode is the control: ordinary operators, expected to mismatch.")
    return tuple(notes)


_ADAPTER = TypeAdapter(Plan)
