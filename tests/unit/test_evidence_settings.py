"""Settings read back from every process are held to the plan, field by field, and so are those of every sample.

Each field of a readback is changed once, in the last process, so that a check that looks at the first only would pass.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk.evidence.schemas import EngineReadback, Readback, TrainReadback
from rlk.evidence.settings import NEUTRAL_SAMPLING, requested_engine, requested_train
from tests.unit.evidence_builder import Change, Draft, build, make_plan, red
from tests.unit.evidence_faults import Fault, assert_caught, on_manifest, on_sample, parameters

TRAIN_FIELDS = sorted(requested_train(make_plan(), 0))
ENGINE_FIELDS = sorted(requested_engine(make_plan(), 0, 0))


def _on_train(**values: Any) -> Change:
    def change(draft: Draft) -> None:
        said: Readback = draft.manifest["readback"]
        last = said.train[-1].model_copy(update=values)
        draft.manifest["readback"] = said.model_copy(update={"train": (*said.train[:-1], last)})

    return change


def _on_engine(**values: Any) -> Change:
    def change(draft: Draft) -> None:
        said: Readback = draft.manifest["readback"]
        *first, ranks = said.engines
        last = (*ranks[:-1], ranks[-1].model_copy(update=values))
        draft.manifest["readback"] = said.model_copy(update={"engines": (*first, last)})

    return change


def _other(value: object) -> object:
    """Some other value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "native" if value == "consistency" else f"{value}x"
    if isinstance(value, dict):
        return {**value, "top_k": 20.0}
    return (*value, 1) if isinstance(value, tuple) else int(str(value)) + 1


def _silent_engine_rank(draft: Draft) -> None:
    said: Readback = draft.manifest["readback"]
    *first, ranks = said.engines
    draft.manifest["readback"] = said.model_copy(update={"engines": (*first, ranks[:-1])})


FAULTS = [
    Fault(
        "generation_config_leaked",
        {"engine_settings"},
        r"engine-01-01: default_sampling is .*'top_k': 20",
        before=_on_engine(default_sampling={**NEUTRAL_SAMPLING, "top_k": 20.0, "top_p": 0.8}),
    ),
    Fault(
        "masters_in_bfloat16",
        {"train_settings"},
        r"train-03: master_dtype is 'bfloat16', expected 'float32'",
        before=_on_train(master_dtype="bfloat16"),
    ),
    Fault(
        "an_engine_rank_that_said_nothing",
        {"engine_settings", "processes"},
        r"readback: processes is .*expected .*engine-01-01",
        before=_silent_engine_rank,
    ),
    Fault(
        "a_process_with_another_kernel",
        {"kernels"},
        r"readback train-03: kernels is .*fallback",
        before=_on_train(kernels={"gemm": "fallback", "attention": "loop"}),
    ),
    Fault(
        "an_engine_without_kernels",
        {"kernels"},
        r"readback engine-01-01: kernels is \{\}",
        before=_on_engine(kernels={}),
    ),
    Fault(
        "no_kernel_named_at_all",
        {"kernels"},
        r"kernels must name each choice once",
        before=on_manifest(kernels=()),
    ),
    Fault(
        "another_temperature",
        {"sampling_settings"},
        r"step 1 sample 7: temperature is 1\.2, the plan asks for 1\.3",
        before=on_sample(1, 7, temperature=1.2),
    ),
    Fault(
        "a_top_p_that_went_through_float32",
        {"sampling_settings"},
        r"step 0 sample 0: top_p is 0\.94999\d+, the plan asks for 0\.95",
        before=on_sample(0, 0, top_p=float(np.float32(0.95))),
    ),
    Fault(
        "a_top_k_nobody_asked_for",
        {"sampling_settings"},
        r"step 0 sample 2: top_k is 20, the plan asks for -1",
        before=on_sample(0, 2, top_k=20),
    ),
    Fault(
        "settings_of_the_neighbour",
        {"sampling_settings"},
        r"step 0 sample 1: temperature is 0\.7, the plan asks for 0\.0",
        before=on_sample(0, 1, temperature=0.7, top_p=0.95),
    ),
]


@parameters(FAULTS)
def test_each_fault_reddens_only_its_checks(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


@pytest.mark.parametrize("name", TRAIN_FIELDS)
def test_each_train_field_is_held_to_the_plan(name: str, tmp_path: Path) -> None:
    value = requested_train(make_plan(), 3)[name]
    _, validation = build(tmp_path, before=_on_train(**{name: _other(value)}))
    assert red(validation) == {"train_settings"}
    assert f"train-03: {name} is" in validation.check("train_settings").message


@pytest.mark.parametrize("name", ENGINE_FIELDS)
def test_each_engine_field_is_held_to_the_plan(name: str, tmp_path: Path) -> None:
    value = requested_engine(make_plan(), 1, 1)[name]
    _, validation = build(tmp_path, before=_on_engine(**{name: _other(value)}))
    assert red(validation) == {"engine_settings"}
    assert f"engine-01-01: {name} is" in validation.check("engine_settings").message


def test_settings_that_no_plan_moves_are_these() -> None:
    """What the claims of a run rest on: were they read from the program alone, both sides could change together."""
    said = requested_engine(make_plan(), 0, 0)
    assert (said["decode_cp"], said["enable_prefix_caching"], said["enable_chunked_prefill"]) == (1, True, True)
    assert (said["dtype"], said["generation_config"]) == ("bfloat16", "vllm")
    assert said["model_class"] == "rlk.rollout.vllm_model.RolloutQwen3"
    assert said["attention_class"] == "rlk.rollout.vllm_attention.PagedBackend"
    assert said["sampler_class"] == "rlk.rollout.vllm_sampler.CanonicalSampler"
    native = requested_engine(make_plan(mode="native"), 0, 0)
    assert native["sampler_class"] == "vllm.v1.sample.sampler.Sampler"
    assert said["default_sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    trainer = requested_train(make_plan(), 0)
    assert (trainer["dtype"], trainer["master_dtype"]) == ("bfloat16", "float32")
    assert trainer["model_class"] == "rlk.model.qwen3.Qwen3"


def test_place_and_transport_of_a_rank_are_those_of_the_topology() -> None:
    plan = make_plan()
    said = [requested_train(plan, rank) for rank in range(4)]
    assert [(one["rank"], one["tp_rank"], one["cp_rank"]) for one in said] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert {one["transport"] for one in said} == {requested_engine(plan, 0, 0)["transport"]} == {plan.transport}
    two = replace(plan, ranks=2, engine_ranks=2)
    assert requested_train(two, 0)["transport"] == requested_engine(two, 0, 0)["transport"] == plan.transport
    alone = replace(plan, ranks=1, engine_ranks=1)
    assert requested_train(alone, 0)["transport"] == requested_engine(alone, 0, 0)["transport"] == "none"


def test_request_that_says_nothing_would_be_drawn_from_the_whole_distribution() -> None:
    assert NEUTRAL_SAMPLING == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip


def test_no_readback_field_escapes_the_checks() -> None:
    # pid is compared by `processes`, kernels by `kernels`, partitioned by `query_partition`; which GPU it was and bytes
    # are facts that no plan asks for; everything else must come from the plan.
    facts = {"gpu", "holdings", "freed_bytes"}
    assert set(TrainReadback.model_fields) == {*TRAIN_FIELDS, "pid", "kernels", *facts}
    assert set(EngineReadback.model_fields) == {*ENGINE_FIELDS, "pid", "kernels", "partitioned", "gpu"}
