"""One option at a time: every edge of every range, from text as the command line gives it and typed as YAML gives it.

Edges are the values next to a bound, the two infinities and NaN, and notations that Python's own parsers would accept.
"""

from __future__ import annotations

import warnings

import pytest
from pydantic import ValidationError

from rlk.plan.config import OPTIONS, RunConfig
from rlk.plan.errors import ConfigErrors
from rlk.plan.resolve import resolve
from rlk.plan.sampling import Sampling
from tests.unit.tiny import SHAPE, profile

REFUSED = [
    ("--mode", "fast", "consistency or native"),
    ("--tp", "3", "1, 2, 4 or 8"),
    ("--tp", "2.0", "1, 2, 4 or 8"),
    ("--cp", "0", "1, 2, 4 or 8"),
    ("--rollout-tp", "16", "1, 2, 4 or 8"),
    ("--rollout-cp", "-1", "1, 2, 4 or 8"),
    ("--temperature", "-0.1", "finite and >= 0"),
    ("--temperature", "nan", "finite and >= 0"),
    ("--temperature", "inf", "finite and >= 0"),
    ("--temperature", "1e39", "within what float32 can hold"),
    ("--temperature", "1e-46", "within what float32 can hold"),
    ("--temperature", "1_0", "finite and >= 0"),
    ("--temperature", "hot", "finite and >= 0"),
    ("--top-p", "0", "(0, 1]; 1 disables it"),
    ("--top-p", "1.7", "(0, 1]; 1 disables it"),
    ("--top-p", "1.0000000000000002", "(0, 1]; 1 disables it"),
    ("--top-p", "nan", "(0, 1]; 1 disables it"),
    ("--top-k", "0", "-1 (off) or 1"),
    ("--top-k", "-2", "-1 (off) or 1"),
    ("--top-k", "1.5", "-1 (off) or 1"),
    ("--mix", "", "T/p/k"),
    ("--mix", "0.7/0.95,", "T/p/k"),
    ("--mix", "0.7/0.95/-1/4", "T/p/k"),
    ("--mix", "0.7/1.7", "T/p/k"),
    ("--steps", "0", "a whole number >= 1"),
    ("--steps", "two", "a whole number >= 1"),
    ("--steps", "1e2", "a whole number >= 1"),
    ("--lr", "-1e-9", "finite and >= 0"),
    ("--lr", "inf", "finite and >= 0"),
    ("--kl-coef", "-0.01", "finite and >= 0"),
    ("--kl-coef", "nan", "finite and >= 0"),
    ("--weight-decay", "-1", "finite and >= 0"),
    ("--weight-decay", "infinity", "finite and >= 0"),
    ("--clip-eps", "0", "finite and > 0"),
    ("--max-grad-norm", "0", "finite and > 0"),
    ("--adam-beta1", "1", "[0, 1)"),
    ("--adam-beta2", "-0.1", "[0, 1)"),
    ("--adam-eps", "0", "finite and > 0"),
    ("--max-response-len", "0", "a whole number >= 1"),
    ("--max-tokens-per-gpu", "0", "a whole number >= 1"),
    ("--seed", "-1", "a whole number 0 to 2^63 - 1"),
    ("--seed", "9223372036854775808", "a whole number 0 to 2^63 - 1"),
    ("--run-id", "../up", "letters, digits"),
    ("--run-id", ".hidden", "letters, digits"),
    ("--run-id", "two words", "letters, digits"),
    ("--run-id", "x" * 129, "letters, digits"),
    ("--output-root", "", "a path"),
    ("--ray-address", "local", "HOST:PORT"),
]

ACCEPTED = [
    ("--tp", "8", "tp", 8),
    ("--cp", "1", "cp", 1),
    ("--temperature", "0", "temperature", 0.0),
    ("--temperature", "1e-6", "temperature", 1e-6),
    ("--temperature", "0.005", "temperature", 0.005),
    ("--top-p", "1", "top_p", 1.0),
    ("--top-p", "1e-300", "top_p", 1e-300),
    ("--top-k", "-1", "top_k", -1),
    ("--top-k", "1", "top_k", 1),
    ("--top-k", "400", "top_k", 400),
    ("--steps", "2", "steps", 2),
    ("--lr", "5e-324", "lr", 5e-324),
    ("--kl-coef", "0", "kl_coef", 0.0),
    ("--weight-decay", "0", "weight_decay", 0.0),
    ("--adam-beta1", "0", "adam_beta1", 0.0),
    ("--max-response-len", "1", "max_response_len", 1),
    ("--max-tokens-per-gpu", "1", "max_tokens_per_gpu", 1),
    ("--prompts-per-step", "16", "prompts_per_step", 16),
    ("--samples-per-prompt", "1", "samples_per_prompt", 1),
    ("--seed", "0", "seed", 0),
    ("--seed", "9223372036854775807", "seed", 2**63 - 1),
    ("--run-id", "A.b_c-9", "run_id", "A.b_c-9"),
    ("--ray-address", "10.0.0.1:6379", "ray_address", "10.0.0.1:6379"),
]

LONG_NAMES = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "temperature": "--rollout-temperature",
    "top_p": "--rollout-top-p",
    "top_k": "--rollout-top-k",
    "max_response_len": "--rollout-max-response-len",
    "steps": "--num-rollout",
    "kl_coef": "--kl-loss-coef",
}


@pytest.mark.parametrize(("flag", "value", "allowed"), REFUSED)
def test_refusal_names_flag_value_and_range(flag: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        resolve({flag: value}, {}, profile(), SHAPE)
    (line,) = caught.value.errors
    shown = f"'{value}'" if value in ("", "two words") else value
    assert line.startswith(f"{flag} {shown}: allowed is ")
    assert allowed in line
    assert "\n" not in line


@pytest.mark.parametrize(("flag", "value", "name", "expected"), ACCEPTED)
def test_edges_of_ranges_are_accepted(flag: str, value: str, name: str, expected: object) -> None:
    config = resolve({flag: value}, {}, profile())
    assert getattr(config, name) == expected
    assert type(getattr(config, name)) is type(expected)


def test_negative_zero_temperature_is_plain_zero() -> None:
    assert str(resolve({"--temperature": "-0.0"}, {}, profile()).temperature) == "0.0"


@pytest.mark.parametrize("name", ["steps", "lr", "temperature", "top_p", "seed", "tp"])
def test_booleans_are_never_taken_for_numbers(name: str) -> None:
    with pytest.raises(ValidationError, match="allowed is"):
        RunConfig.model_validate({name: True})


@pytest.mark.parametrize(("name", "flag"), LONG_NAMES.items())
def test_longer_names_set_the_same_field(name: str, flag: str) -> None:
    assert flag in OPTIONS[name].flags
    value = "2" if name not in ("top_p", "cp") else "1"
    assert getattr(resolve({flag: value}, {}, profile()), name) == int(value)


def test_no_two_options_share_a_name() -> None:
    flags = [flag for option in OPTIONS.values() for flag in option.flags]
    variables = [option.variable for option in OPTIONS.values()]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables) == len(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_default_reads_back_from_text(name: str) -> None:
    domain, default = OPTIONS[name].domain, RunConfig.model_fields[name].default
    if default is not None:
        assert domain.parse(domain.text(default)) == default


def test_mix_reads_text_triples_and_mappings_alike() -> None:
    expected = (Sampling(0.7, 0.95), Sampling(1.3, 0.99, 20), Sampling(0.0))
    forms: list[object] = [
        "0.7/0.95,1.3/0.99/20,0",
        [[0.7, 0.95], [1.3, 0.99, 20], 0],
        ["0.7/0.95/-1", {"temperature": 1.3, "top_p": 0.99, "top_k": 20}, {"temperature": 0}],
    ]
    for form in forms:
        assert resolve({"mix": form}, {}, profile(), SHAPE).mix == expected


def test_mix_text_reads_back_the_same_mix() -> None:
    mix = (Sampling(0.1 + 0.2, 0.95), Sampling(1e-6, 1.0, 7), Sampling(0.0))
    assert OPTIONS["mix"].domain.parse(OPTIONS["mix"].domain.text(mix)) == mix


@pytest.mark.parametrize("bad", [(-1.0, 1.0, -1), (1.0, 0.0, -1), (1.0, 1.0, 0), (float("nan"), 1.0, -1)])
def test_samplings_are_validated_when_constructed(bad: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        Sampling(*bad)


def test_config_is_frozen_and_closed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().tp = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        RunConfig.model_validate({"top": 1})


def test_config_raises_no_warning_and_reads_back() -> None:
    config = RunConfig(command="run", mix=(Sampling(0.7, 0.95), Sampling(0.0)), lr=1e-4, sources={"lr": "profile"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
