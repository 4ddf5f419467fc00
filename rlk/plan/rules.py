"""Rules between options, and between options, profile and model. Each is one function with one error line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from rlk.plan.config import OPTIONS, RunConfig
from rlk.plan.errors import shown
from rlk.plan.faults import BY_NAME
from rlk.plan.profile import Profile
from rlk.plan.shape import ModelShape
from rlk.plan.topology import DEGREES

VERIFY_STEPS = 2


@dataclass(frozen=True)
class Case:
    """What a rule judges. `labels` says, by field, how the user put it; other fields are named by their flag."""

    config: RunConfig
    profile: Profile
    shape: ModelShape
    labels: Mapping[str, str] = field(default_factory=dict)

    def said(self, name: str) -> str:
        """The field as the user put it, such as `--rollout-top-k 20` or `RLK_TP=3`."""
        option = OPTIONS[name]
        if name in self.labels or option.is_switch:
            return self.labels.get(name, option.flag)
        source = "" if name in self.config.sources else " (the default)"
        return f"{option.flag} {option.domain.text(getattr(self.config, name))}{source}"


Rule = Callable[[Case], str | None]
_RULES: list[tuple[frozenset[str], Rule]] = []


def check(case: Case, skip: Collection[str] = ()) -> list[str]:
    """One line for each rule that is broken; rules that read a field in `skip` (already refused) are left out."""
    lines = (rule(case) for fields, rule in _RULES if not fields & set(skip))
    return [line for line in lines if line is not None]


def _reads(*fields: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.append((frozenset(fields), rule))
        return rule

    return register


@_reads("tp", "cp")
def _train_fills_the_ranks(case: Case) -> str | None:
    tp, cp, ranks = case.config.tp, case.config.cp, case.profile.ranks
    if ranks % tp:
        return f"{case.said('tp')}: allowed is {_divisors(ranks)}: TP * CP must equal the {ranks} ranks of the profile"
    if cp is not None and tp * cp != ranks:
        return (
            f"{case.said('cp')}: allowed is {ranks // tp} with TP {tp}: TP * CP must equal the {ranks} ranks of the "
            f"profile; left out, it is inferred"
        )
    return None


@_reads("rollout_tp", "rollout_cp")
def _engines_divide_the_ranks(case: Case) -> str | None:
    tp, cp, ranks = case.config.rollout_tp, case.config.rollout_cp, case.profile.ranks
    if ranks % (tp * cp) == 0:
        return None
    with_cp = f" with {case.said('rollout_cp')}" if cp > 1 else ""
    return f"{case.said('rollout_tp')}{with_cp}: allowed is TP * CP that divides the {ranks} ranks of the profile"


@_reads("top_k", "mix")
def _top_k_within_the_real_vocabulary(case: Case) -> str | None:
    size, tokenizer = case.shape.vocab_size, case.shape.tokenizer_len
    if all(sampling.top_k <= size for sampling in case.config.samplings):
        return None
    name = "top_k" if case.config.mix is None else "mix"
    known = "" if tokenizer is None else f", of which its tokenizer knows {tokenizer}"
    return f"{case.said(name)}: allowed is top-k -1 (off) or 1 to {size}, the vocab_size of the model{known}"


@_reads("steps")
def _verify_takes_two_steps(case: Case) -> str | None:
    if case.config.command != "verify" or case.config.steps >= VERIFY_STEPS:
        return None
    return (
        f"{case.said('steps')}: verify allows {VERIFY_STEPS} or more: a one-step run cannot show that weights changed; "
        "`rlk run` takes 1"
    )


@_reads("lr")
def _verify_moves_the_weights(case: Case) -> str | None:
    if case.config.command != "verify" or case.config.lr > 0:
        return None
    return f"{case.said('lr')}: verify allows finite and > 0: with 0 no weight changes; `rlk run` takes 0"


@_reads("max_response_len")
def _sequence_within_the_positions(case: Case) -> str | None:
    room = case.shape.max_positions - case.profile.max_prompt_len
    if case.config.max_response_len <= room:
        return None
    return (
        f"{case.said('max_response_len')}: allowed is 1 to {room}: the model has {case.shape.max_positions} positions "
        f"and a prompt up to {case.profile.max_prompt_len} tokens"
    )


@_reads("max_response_len", "rollout_tp", "rollout_cp")
def _cache_holds_a_sequence(case: Case) -> str | None:
    engine, config = case.profile.engine, case.config
    tokens = case.profile.max_prompt_len + config.max_response_len
    pages = -(-tokens // engine.block_size) + 1  # vLLM never gives out its first page
    needed = pages * engine.block_size * case.shape.kv_bytes(config.rollout_tp, config.rollout_cp)
    if needed <= engine.kv_cache_bytes:
        return None
    return (
        f"{case.said('max_response_len')}: a sequence of {tokens} tokens takes {needed} bytes of KV cache a rank: "
        f"allowed is the profile's engine.kv_cache_bytes {engine.kv_cache_bytes}"
    )


@_reads("rollout_cp")
def _pages_are_cut_evenly(case: Case) -> str | None:
    cp, head = case.config.rollout_cp, case.shape.head_dim
    if head % cp == 0:
        return None
    return (
        f"{case.said('rollout_cp')}: allowed is a degree that divides the model's head_dim {head}: a rank keeps 1 / CP "
        "of every KV page, which vLLM can only be told as shorter heads"
    )


@_reads("temperature", "mix", "mode")
def _stock_sampler_takes_the_temperature(case: Case) -> str | None:
    odd = [s.temperature for s in case.config.samplings if s.temperature and not 0.01 <= s.temperature <= 2]
    if case.config.mode == "consistency" or not odd:
        return None
    said = case.said("mix" if case.config.mix else "temperature")
    return f"{said}: native mode allows 0 and 0.01 to 2: vLLM's own sampler lifts or refuses {shown(odd[0])}"


@_reads("use_rollout_logprobs", "mode")
def _trainer_recomputes_the_policy(case: Case) -> str | None:
    if not case.config.use_rollout_logprobs or case.config.mode == "native":
        return None
    return (
        f"{case.said('use_rollout_logprobs')}: not allowed in consistency mode: the trainer would compare the engine's "
        "log-probs with themselves; leave it out or use --mode native"
    )


@_reads("inject", "steps")
def _fault_is_known_and_has_its_step(case: Case) -> str | None:
    inject = case.config.inject
    if inject is None:
        return None
    name, _, step = inject.partition("@")
    if name not in BY_NAME:
        return f"{case.said('inject')}: allowed is one of {', '.join(BY_NAME)}"
    if step and int(step) >= case.config.steps:
        return f"{case.said('inject')}: allowed are steps 0 to {case.config.steps - 1}: they count from 0"
    return None


@_reads("inject", "confirm_inject")
def _faults_stay_in_tests(case: Case) -> str | None:
    if case.config.inject is None or case.profile.test or case.config.confirm_inject:
        return None
    return (
        f"{case.said('inject')}: profile {case.profile.name} is no test profile: a fault makes the run worthless; "
        "--confirm-inject allows it"
    )


@_reads("inject", "mode")
def _faults_break_the_canonical_program(case: Case) -> str | None:
    if case.config.inject is None or case.config.mode == "consistency":
        return None
    return f"{case.said('inject')}: native mode is expected to mismatch without a fault: use --mode consistency"


@_reads("probe", "probe_row")
def _row_needs_a_probe(case: Case) -> str | None:
    if case.config.probe_row is None or case.config.probe:
        return None
    return f"{case.said('probe_row')}: allowed with {OPTIONS['probe'].flag} only, which records the row's fingerprint"


@_reads("detach", "as_json")
def _json_waits_for_the_result(case: Case) -> str | None:
    if not (case.config.detach and case.config.as_json):
        return None
    return (
        f"{case.said('as_json')}: not allowed with {case.said('detach')}, which does not wait for a result; "
        "`rlk validate RUN_DIR --json` gives it later"
    )


def not_built(config: RunConfig, profile: Profile) -> Iterator[str]:
    """One line for everything that has a plan but that this version cannot run; `verify` and `run` refuse it.

    The only place that knows: what gets built later loses its line here and nothing else changes.
    """
    if config.rollout_cp > 1 and profile.device == "cuda" and config.mode == "native":
        yield f"{OPTIONS['rollout_cp'].flag} {config.rollout_cp}: native mode on cuda runs 1 only"


def _divisors(ranks: int) -> str:
    *others, last = [str(degree) for degree in DEGREES if ranks % degree == 0]
    return f"{', '.join(others)} or {last}" if others else last
