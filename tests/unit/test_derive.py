"""Every derived value, for all 40 pairs of train and rollout topologies of eight ranks, against tables written by hand.

Tables and not formulas: a formula here would repeat the one under test. 64 samples a step make the engines' share 8,
16, 32 or 64, so that each engine count gives other graph sizes.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.errors import ConfigErrors
from rlk.plan.profile import Profile
from rlk.plan.sampling import Sampling
from rlk.plan.topology import DEGREES, Topology
from tests.unit.tiny import ROLLOUT, SHAPE, TOPOLOGIES, profile

Pair = tuple[tuple[int, int], tuple[int, int]]

ENGINES = {1: 8, 2: 4, 4: 2, 8: 1}
CAPPED = {1: 2, 2: 2, 4: 2, 8: 1}
BUDGET = {8: 128, 4: 256, 2: 512, 1: 1024}
GRAPHS = {
    8: (1, 2, 4, 8),
    4: (1, 2, 4, 8, 16),
    2: (1, 2, 4, 8, 16, 24, 32),
    1: (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64),
}
CUDA: dict[str, Any] = {
    "device": "cuda",
    "prompts_per_step": 8,
    "samples_per_prompt": 8,
    "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 1024},
}

every_topology = pytest.mark.parametrize("pair", TOPOLOGIES, ids=lambda p: "tp{}-cp{}_rtp{}-rcp{}".format(*p[0], *p[1]))


def plan_of(pair: Pair = ((2, 4), (4, 1)), machine: Profile | None = None, **changes: Any) -> Plan:
    (tp, cp), (rollout_tp, rollout_cp) = pair
    topology = {"tp": tp, "cp": cp, "rollout_tp": rollout_tp, "rollout_cp": rollout_cp}
    config = RunConfig(**{**topology, "max_response_len": 64, **changes})
    return derive(config, machine or profile(), SHAPE)


def test_forty_pairs_are_forty_pairs() -> None:
    assert len(set(TOPOLOGIES)) == 40


@every_topology
def test_engines_and_ranks_follow_the_topology(pair: Pair) -> None:
    plan = plan_of(pair)
    size = pair[1][0] * pair[1][1]
    assert (plan.train, plan.rollout) == (Topology(*pair[0]), Topology(*pair[1]))
    assert (plan.ranks, plan.engine_ranks, plan.engines) == (8, size, ENGINES[size])
    assert plan.engine_cap is None


@every_topology
def test_engine_cap_is_said_where_it_bites(pair: Pair) -> None:
    plan = plan_of(pair, profile(engine={"max_engines": 2}))
    fitting = ENGINES[plan.engine_ranks]
    assert plan.engines == CAPPED[plan.engine_ranks]
    if fitting > 2:
        assert plan.engine_cap == f"2 of {fitting} engines: profile tiny allows at most 2"
        assert f"{plan.engine_cap}." in plan.notes
    else:
        assert plan.engine_cap is None


@every_topology
def test_token_budget_keeps_the_logical_one(pair: Pair) -> None:
    plan = plan_of(pair)
    assert (plan.token_budget, plan.logical_budget) == (BUDGET[pair[0][1]], 1024)
    plan = plan_of(pair, max_tokens_per_gpu=100)
    assert (plan.token_budget, plan.logical_budget) == (100, 100 * pair[0][1])


@every_topology
def test_graph_sizes_follow_the_engine_share(pair: Pair) -> None:
    assert plan_of(pair).graph_sizes == ()
    plan = plan_of(pair, profile(**CUDA))
    assert plan.graph_sizes == (GRAPHS[plan.engines] if plan.engine_ranks == 1 else ())
    plan = plan_of(pair, profile(**CUDA, collectives="cuda-ipc"))
    assert plan.graph_sizes == (GRAPHS[plan.engines] if plan.rollout.cp == 1 else ())


@every_topology
def test_offload_only_where_both_are_unsharded(pair: Pair) -> None:
    assert not plan_of(pair).offload
    assert plan_of(pair, profile(**CUDA)).offload == (pair[0][0] == 1 and pair[1][0] == 1)


@every_topology
def test_topology_moves_no_size_of_the_model(pair: Pair) -> None:
    plan = plan_of(pair)
    assert (plan.padded_vocab, plan.max_model_len, plan.samples_per_step) == (1024, 128, 16)
    assert dataclasses.replace(SHAPE, vocab_size=151_936, tokenizer_len=151_669).padded_vocab == 152_576


@every_topology
def test_plan_reads_back_as_itself(pair: Pair) -> None:
    for plan in (plan_of(pair, lr=0.1 + 0.2, mix="0.7/0.95,1e-6/1/3,0"), plan_of(pair, profile(**CUDA))):
        text = plan.to_json()
        assert Plan.from_json(text) == plan
        assert Plan.from_json(text).to_json() == text
        assert derive(plan.config, plan.profile, plan.shape) == plan


@every_topology
def test_plan_that_was_edited_is_not_derived(pair: Pair) -> None:
    content = json.loads(plan_of(pair).to_json())
    content["engines"] += 1
    edited = Plan.from_json(json.dumps(content))
    assert derive(edited.config, edited.profile, edited.shape) != edited


@pytest.mark.parametrize("ranks", DEGREES)
def test_fewer_ranks_give_smaller_topologies(ranks: int) -> None:
    for tp in (degree for degree in DEGREES if ranks % degree == 0):
        plan = derive(RunConfig(tp=tp, rollout_tp=tp), profile(ranks=ranks), SHAPE)
        assert plan.train == Topology(tp, ranks // tp)
        assert (plan.ranks, plan.engines, plan.token_budget) == (ranks, ranks // tp, 1024 // (ranks // tp))


@pytest.mark.parametrize("rollout", [pair for pair in ROLLOUT if pair[1] > 1])
def test_rollout_context_parallelism_makes_wider_engines(rollout: tuple[int, int]) -> None:
    plan = plan_of(((2, 4), rollout))
    assert (plan.rollout.cp, plan.engines) == (rollout[1], 8 // (rollout[0] * rollout[1]))
    assert plan.unbuilt == ()


def test_rollout_context_parallelism_cuts_the_heads() -> None:
    with pytest.raises(ConfigErrors, match=r"--rollout-cp 8.*allowed is a degree that divides the model's head_dim 12"):
        derive(RunConfig(tp=2, rollout_tp=1, rollout_cp=8), profile(), dataclasses.replace(SHAPE, head_dim=12))


def test_greedy_plans_one_sample_a_prompt() -> None:
    plan = plan_of(temperature=0, top_p=0.9, top_k=5)
    assert (plan.samples_per_prompt, plan.samples_per_step, plan.baseline) == (1, 4, "batch")
    assert any("ignore top-p and top-k" in note for note in plan.notes)
    all_greedy = plan_of(mix="0,0/0.5")
    assert (all_greedy.samples_per_prompt, all_greedy.baseline) == (1, "batch")


def test_greedy_beside_others_keeps_the_group() -> None:
    plan = plan_of(mix="0.7/0.95,0")
    assert (plan.samples_per_prompt, plan.baseline) == (4, "group")
    assert any("ignore top-p and top-k" in note for note in plan.notes)
    assert plan_of().baseline == "group"


def test_single_samples_are_compared_over_the_batch() -> None:
    plan = plan_of(machine=profile(samples_per_prompt=1))
    assert (plan.samples_per_step, plan.baseline) == (4, "batch")


def test_prompts_and_samples_of_a_step_are_asked_for_or_the_profiles() -> None:
    asked = plan_of(prompts_per_step=16, samples_per_prompt=1)
    assert (asked.prompts_per_step, asked.samples_per_step, asked.baseline) == (16, 16, "batch")
    several = plan_of(temperature=0, samples_per_prompt=2)
    assert (several.prompts_per_step, several.samples_per_prompt, several.baseline) == (4, 2, "group")
    said = {name: plan_of().effective()[name] for name in ("prompts_per_step", "samples_per_prompt")}
    assert said == {"prompts_per_step": 4, "samples_per_prompt": 4}


def test_mix_cycles_over_the_batch() -> None:
    plan = plan_of(mix="0.7/0.95,1.3/0.99/20,0")
    expected = [Sampling(0.7, 0.95), Sampling(1.3, 0.99, 20), Sampling(0.0), Sampling(0.7, 0.95)]
    assert [plan.sampling_of(index) for index in range(4)] == expected
    assert plan_of(temperature=0.7).sampling_of(5) == Sampling(0.7)


def test_derive_refuses_what_the_rules_refuse() -> None:
    with pytest.raises(ConfigErrors) as caught:
        derive(RunConfig(tp=2, cp=2, top_k=401, steps=1), profile(), SHAPE)
    assert [line.split(" ")[0] for line in caught.value.errors] == ["--cp", "--top-k", "--steps"]


def test_command_says_every_value_and_repeats_the_plan() -> None:
    plan = plan_of(mix="0.7/0.95,0", mode="native")
    (command,) = plan.commands
    assert command.startswith("rlk verify --mode native --tp 2 --cp 4 --rollout-tp 4 ")
    assert " --mix 0.7/0.95/-1,0/1/-1 " in command
    assert " --max-tokens-per-gpu 256 " in command
    assert "--temperature" not in command


def test_run_id_changes_nothing_else() -> None:
    plan = plan_of()
    with pytest.raises(ValueError, match="no run id"):
        _ = plan.run_id
    named = plan.with_run_id("first")
    assert named.run_id == "first"
    assert dataclasses.replace(named, config=plan.config, commands=plan.commands) == plan


def test_effective_values_fill_what_was_left_out() -> None:
    plan = derive(RunConfig(tp=2), profile(), SHAPE)
    assert plan.requested()["cp"]["value"] is None
    assert (plan.effective()["cp"], plan.effective()["max_tokens_per_gpu"]) == (4, 256)


def test_environments_differ_by_device_and_side() -> None:
    cpu, cuda = plan_of(), plan_of(machine=profile(**CUDA))
    assert cpu.engine_env["RLK_PLATFORM"] == "cpu"
    assert cpu.engine_env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert cuda.engine_env["RLK_PLATFORM"] == "cuda"
    for env in (cuda.train_env, cuda.engine_env):
        assert (env["CUBLAS_WORKSPACE_CONFIG"], env["CUBLASLT_WORKSPACE_SIZE"]) == (":0:0", "0")
    for env in (cpu.train_env, cpu.engine_env):
        assert "CUBLAS_WORKSPACE_CONFIG" not in env
        assert (env["OMP_NUM_THREADS"], env["TORCHDYNAMO_DISABLE"], env["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert not any(name.startswith("VLLM") for name in cpu.train_env)


@pytest.mark.parametrize(
    "change", [{"schema": "rlk.plan/2"}, {"engines": "many"}, {"extra": 1}, {"train": {"tp": 3, "cp": 1}}]
)
def test_text_that_is_no_plan_is_refused(change: dict[str, Any]) -> None:
    content = {**json.loads(plan_of().to_json()), **change}
    with pytest.raises(ConfigErrors, match="plan: "):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("machine", "transport"),
    [({}, "shared-memory"), (CUDA, "host-staged"), ({**CUDA, "collectives": "cuda-ipc"}, "cuda-ipc")],
)
def test_transport_is_the_profiles_choice(machine: dict[str, Any], transport: str) -> None:
    assert plan_of(machine=profile(**machine)).transport == transport


@pytest.mark.parametrize(
    ("pair", "changes", "words"),
    [
        (((8, 1), (1, 1)), {}, None),
        (((8, 1), (2, 1)), {}, "exchange bytes through the host"),
        (((8, 1), (1, 2)), {}, "which pages a step takes"),
        (((8, 1), (1, 1)), {"probe": True}, "a probe reads"),
        (((8, 1), (1, 1)), {"mode": "native"}, "native attention looks"),
        (((8, 1), (1, 1)), {"inject": "split-k", "confirm_inject": True}, "a fault on purpose"),
    ],
)
def test_an_eager_engine_says_why(pair: Pair, changes: dict[str, Any], words: str | None) -> None:
    plan = plan_of(pair, profile(**CUDA), **changes)
    said = [note for note in plan.notes if "CUDA graph" in note]
    assert (plan.graph_sizes == ()) == (words is not None) == bool(said)
    assert words is None or words in said[0]
