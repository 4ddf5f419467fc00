"""Everything a user may ask for: the one source of flags, RLK_* variables, defaults, ranges and help."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from rlk.plan.domains import Choice, Domain, Real, Switch, Text, Whole
from rlk.plan.options import Option
from rlk.plan.sampling import TEMPERATURE, TOP_K, TOP_P, MixDomain, Sampling
from rlk.plan.topology import DEGREES

_DEGREE = Choice("1, 2, 4 or 8", values=DEGREES)
_POSITIVE = Whole("a whole number >= 1", low=1)
_NOT_NEGATIVE = Real("finite and >= 0", low=0.0)
_ABOVE_ZERO = Real("finite and > 0", low=0.0, open_low=True)
_BETA = Real("[0, 1)", low=0.0, high=1.0, open_high=True)
_SEED = Whole("a whole number 0 to 2^63 - 1", low=0, high=2**63 - 1)
_RUN_ID = Text(
    "letters, digits, '.', '_' and '-', the first a letter or digit, at most 128", r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
)
_PATH = Text("a path")
_ROW = Text("OP@SAMPLE/POSITION, as in layers.1.qkv@17/23", r"[a-z_0-9.]+@[0-9]{1,12}/[0-9]{1,8}")
_ADDRESS = Text(
    "HOST:PORT or http://HOST:PORT of the dashboard of a Ray that is running (8265 unless it was started otherwise); "
    "left out, a run starts its own Ray",
    r"(https?://)?[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}",
)

_FAULT = Text("NAME or NAME@STEP of docs/faults.md", r"[a-z0-9-]+(@[0-9]{1,6})?")


def _option(*flags: str, domain: Domain, help: str, run_default: object = None, in_profile: bool = True) -> Option:
    return Option(flags, domain, help, run_default, in_profile)


class RunConfig(BaseModel):
    """What was asked for, validated field by field at construction; rules between fields are in `rlk.plan.rules`.

    A field takes its typed value or the text of it. `sources` says where each value came from; a field that it does
    not name has its default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    command: Literal["verify", "run"] = "verify"
    sources: dict[str, str] = {}

    mode: Annotated[
        Literal["consistency", "native"],
        _option(
            "--mode",
            domain=Choice("consistency or native", values=("consistency", "native")),
            help="consistency: the canonical program; native: ordinary operators, expected to mismatch",
        ),
    ] = "consistency"
    tp: Annotated[
        int, _option("--tp", "--tensor-model-parallel-size", domain=_DEGREE, help="tensor parallelism of the trainer")
    ] = 1
    cp: Annotated[
        int | None,
        _option(
            "--cp",
            "--context-parallel-size",
            domain=_DEGREE,
            help="context parallelism of the trainer; left out it is ranks / TP",
        ),
    ] = None
    rollout_tp: Annotated[
        int,
        _option(
            "--rollout-tp", "--rollout-tensor-parallel-size", domain=_DEGREE, help="tensor parallelism of an engine"
        ),
    ] = 1
    rollout_cp: Annotated[
        int,
        _option(
            "--rollout-cp",
            "--rollout-context-parallel-size",
            "--prefill-context-parallel-size",
            domain=_DEGREE,
            help="prefill context parallelism of an engine",
        ),
    ] = 1
    temperature: Annotated[
        float, _option("--temperature", "--rollout-temperature", domain=TEMPERATURE, help="sampling temperature")
    ] = 1.0
    top_p: Annotated[float, _option("--top-p", "--rollout-top-p", domain=TOP_P, help="nucleus mass")] = 1.0
    top_k: Annotated[
        int, _option("--top-k", "--rollout-top-k", domain=TOP_K, help="tokens kept, before the nucleus")
    ] = -1
    mix: Annotated[
        tuple[Sampling, ...] | None,
        _option(
            "--mix",
            domain=MixDomain(),
            help="several samplings in one batch: T/p/k triples, cycled over its samples; replaces the three above",
        ),
    ] = None
    steps: Annotated[
        int, _option("--steps", "--num-rollout", domain=_POSITIVE, help="training steps", run_default=200)
    ] = 2
    prompts_per_step: Annotated[
        int | None,
        _option(
            "--prompts-per-step",
            "--rollout-batch-size",
            domain=_POSITIVE,
            help="prompts of a step; left out the profile's number",
            in_profile=False,
        ),
    ] = None
    samples_per_prompt: Annotated[
        int | None,
        _option(
            "--samples-per-prompt",
            "--n-samples-per-prompt",
            domain=_POSITIVE,
            help="samples of a prompt; left out the profile's number, and 1 where all are greedy",
            in_profile=False,
        ),
    ] = None
    lr: Annotated[float, _option("--lr", "--learning-rate", domain=_NOT_NEGATIVE, help="learning rate")] = 5e-7
    kl_coef: Annotated[
        float, _option("--kl-coef", "--kl-loss-coef", domain=_NOT_NEGATIVE, help="weight of the KL term")
    ] = 0.01
    weight_decay: Annotated[
        float, _option("--weight-decay", domain=_NOT_NEGATIVE, help="decoupled decay; none on 1-D tensors")
    ] = 0.1
    clip_eps: Annotated[
        float, _option("--clip-eps", "--eps-clip", domain=_ABOVE_ZERO, help="clip range of the policy ratio")
    ] = 0.2
    max_grad_norm: Annotated[
        float, _option("--max-grad-norm", "--clip-grad", domain=_ABOVE_ZERO, help="norm above which gradients scale")
    ] = 1.0
    adam_beta1: Annotated[float, _option("--adam-beta1", domain=_BETA, help="decay of the first moment")] = 0.9
    adam_beta2: Annotated[float, _option("--adam-beta2", domain=_BETA, help="decay of the second moment")] = 0.98
    adam_eps: Annotated[float, _option("--adam-eps", domain=_ABOVE_ZERO, help="term under the update's root")] = 1e-8
    max_response_len: Annotated[
        int, _option("--max-response-len", "--rollout-max-response-len", domain=_POSITIVE, help="response tokens")
    ] = 512
    ignore_eos: Annotated[
        bool,
        _option(
            "--ignore-eos",
            domain=Switch(),
            help="no id ends a response: each has the most tokens that are allowed",
        ),
    ] = False
    max_tokens_per_gpu: Annotated[
        int | None,
        _option(
            "--max-tokens-per-gpu",
            domain=_POSITIVE,
            help="tokens a rank per micro-batch; left out it is 1024 / CP",
        ),
    ] = None
    seed: Annotated[int, _option("--seed", domain=_SEED, help="key of the sampler and of the data order")] = 0
    use_rollout_logprobs: Annotated[
        bool,
        _option("--use-rollout-logprobs", domain=Switch(), help="train on the engine's log-probs; native mode only"),
    ] = False
    probe: Annotated[
        bool,
        _option(
            "--probe",
            domain=Switch(),
            help="record a fingerprint a row of every op's output, so that a mismatch has a place",
            in_profile=False,
        ),
    ] = False
    probe_row: Annotated[
        str | None,
        _option(
            "--probe-row",
            domain=_ROW,
            help="with --probe, keep the raw words of one row that an earlier run named, so that it names the element",
            in_profile=False,
        ),
    ] = None
    run_id: Annotated[
        str | None,
        _option("--run-id", domain=_RUN_ID, help="name of the run directory, never reused", in_profile=False),
    ] = None
    output_root: Annotated[
        str, _option("--output-root", domain=_PATH, help="folder that holds the run directories")
    ] = "runs"
    ray_address: Annotated[
        str | None,
        _option(
            "--ray-address",
            domain=_ADDRESS,
            help="submit to the Ray that is running there, by its dashboard's address; RAY_ADDRESS is refused",
        ),
    ] = None
    allow_dirty: Annotated[
        bool,
        _option(
            "--allow-dirty",
            domain=Switch(),
            help="run a checkout with uncommitted changes, recorded by their hash; a test profile always may",
            in_profile=False,
        ),
    ] = False
    profile: Annotated[
        str | None,
        _option(
            "--profile",
            domain=_PATH,
            help="profile file or embedded name; left out ./.rlk-profile.json, else tiny-cpu",
            in_profile=False,
        ),
    ] = None
    inject: Annotated[
        str | None,
        _option(
            "--inject",
            domain=_FAULT,
            help="break the run on purpose: a fault of docs/faults.md, in one step or in all; test profiles only",
            in_profile=False,
        ),
    ] = None
    confirm_inject: Annotated[
        bool,
        _option(
            "--confirm-inject",
            domain=Switch(),
            help="allow --inject outside a test profile",
            in_profile=False,
        ),
    ] = False
    detach: Annotated[
        bool, _option("--detach", domain=Switch(), help="return at once and run in the background", in_profile=False)
    ] = False
    as_json: Annotated[
        bool,
        _option("--json", domain=Switch(), help="end with one JSON object on standard output", in_profile=False),
    ] = False

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """The samplings that a batch cycles through; one unless a mix was asked for."""
        return self.mix or (Sampling(self.temperature, self.top_p, self.top_k),)

    def requested(self) -> dict[str, dict[str, object]]:
        """Every option's value as asked for, in JSON types, and its source."""
        values = self.model_dump(mode="json")
        return {name: {"value": values[name], "source": self.sources.get(name, "default")} for name in OPTIONS}


def _options() -> dict[str, Option]:
    found = {}
    for name, field in RunConfig.model_fields.items():
        for item in field.metadata:
            if isinstance(item, Option):
                found[name] = item
    return found


OPTIONS: dict[str, Option] = _options()
"""The option of every field that has one, by field name, in the order of the help."""
