"""Several options together: precedence, sources, rules between fields, and all errors at once.

Ranks 1, 2, 4 and 8 are all that a profile may have, so each rule about them is tried on each.
"""

from __future__ import annotations

import pytest

from rlk.plan.errors import ConfigErrors
from rlk.plan.resolve import Command, resolve
from rlk.plan.sampling import Sampling
from rlk.plan.topology import DEGREES
from tests.unit.tiny import SHAPE, profile


def errors(cli: object, env: dict[str, str] | None = None, command: Command = "verify", **changes: object) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        resolve(cli, env or {}, profile(**changes), SHAPE, command=command)  # type: ignore[arg-type]
    return list(caught.value.errors)


def test_stronger_layer_wins_in_each_pair() -> None:
    tiny = profile(defaults={"lr": 1e-3})
    assert resolve({}, {}, profile()).lr == 5e-7
    assert resolve({}, {}, tiny).lr == 1e-3
    assert resolve({}, {"RLK_LR": "1e-4"}, tiny).lr == 1e-4
    assert resolve({"--lr": "1e-5"}, {"RLK_LR": "1e-4"}, tiny).lr == 1e-5


def test_source_of_every_value_is_kept() -> None:
    config = resolve({"--tp": "2"}, {"RLK_SEED": "7"}, profile(defaults={"lr": 1e-3}))
    requested = config.requested()
    assert requested["tp"] == {"value": 2, "source": "command line"}
    assert requested["seed"] == {"value": 7, "source": "environment"}
    assert requested["lr"] == {"value": 1e-3, "source": "profile"}
    assert requested["kl_coef"] == {"value": 0.01, "source": "default"}
    assert requested["cp"] == {"value": None, "source": "default"}


def test_run_and_verify_differ_in_default_steps() -> None:
    assert resolve({}, {}, profile()).steps == 2
    assert resolve({}, {}, profile(), command="run").steps == 200
    assert resolve({}, {}, profile(defaults={"steps": 5}), command="run").steps == 5


def test_empty_variables_and_other_programs_are_ignored() -> None:
    assert resolve({}, {"RLK_TP": "", "TP": "3", "RLK_PLATFORM": "cpu", "RLK_GEMM": "triton"}, profile()).tp == 1


def test_unknown_names_are_refused_with_a_guess() -> None:
    assert errors({"--top-pp": "1"}) == ["--top-pp: no such option: did you mean --top-p?"]
    assert errors({}, {"RLK_TOPP": "1"}) == ["RLK_TOPP=1: no such option: did you mean RLK_TOP_P?"]
    (line,) = errors({}, defaults={"learning": 1})
    assert line.startswith("profile tiny: defaults.learning: no default may be given for it")


@pytest.mark.parametrize("name", ["run_id", "profile", "detach", "as_json", "probe", "probe_row"])
def test_profile_may_not_choose_per_run_options(name: str) -> None:
    (line,) = errors({}, defaults={name: "1"})
    assert line.startswith(f"profile tiny: defaults.{name}: no default may be given for it")


def test_error_names_the_layer_that_said_it() -> None:
    assert errors({}, {"RLK_TOP_P": "2"}) == ["RLK_TOP_P=2: allowed is (0, 1]; 1 disables it"]
    assert errors({}, defaults={"top_p": 2}) == ["profile tiny: defaults.top_p 2: allowed is (0, 1]; 1 disables it"]
    assert errors({"--rollout-top-p": "2"}) == ["--rollout-top-p 2: allowed is (0, 1]; 1 disables it"]


def test_two_names_may_not_contradict_each_other() -> None:
    same = [("--tp", "2"), ("--tensor-model-parallel-size", "2")]
    assert resolve(same, {}, profile()).tp == 2
    contradiction = [("--tp", "2"), ("--tensor-model-parallel-size", "4")]
    assert errors(contradiction) == ["--tensor-model-parallel-size 4: already given as --tp 2: say it once"]


def test_every_error_is_reported_at_once() -> None:
    said = {"--tp": "3", "--top-p": "1.7", "--top-k": "401", "--steps": "1", "--lr": "0", "--seed": "-1", "--what": "1"}
    lines = errors(said, {"RLK_MODE": "fast"})
    assert [line.split(":")[0] for line in lines] == [
        "--what",
        "RLK_MODE=fast",
        "--tp 3",
        "--top-p 1.7",
        "--seed -1",
        "--top-k 401",
        "--steps 1",
        "--lr 0",
    ]


def test_refused_field_raises_no_second_error() -> None:
    assert len(errors({"--tp": "3", "--cp": "4"})) == 1


@pytest.mark.parametrize("ranks", DEGREES)
@pytest.mark.parametrize("tp", DEGREES)
def test_train_parallelism_fills_the_ranks(ranks: int, tp: int) -> None:
    if ranks % tp:
        (line,) = errors({"--tp": str(tp)}, ranks=ranks)
        assert line.startswith(f"--tp {tp}: allowed is ")
        assert f"TP * CP must equal the {ranks} ranks" in line
        return
    assert resolve({"--tp": str(tp), "--cp": str(ranks // tp)}, {}, profile(ranks=ranks), SHAPE).cp == ranks // tp
    for cp in DEGREES:
        if tp * cp != ranks:
            (line,) = errors({"--tp": str(tp), "--cp": str(cp)}, ranks=ranks)
            assert line.startswith(f"--cp {cp}: allowed is {ranks // tp} with TP {tp}")


@pytest.mark.parametrize("ranks", DEGREES)
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("cp", DEGREES)
def test_engines_divide_the_ranks(ranks: int, tp: int, cp: int) -> None:
    said = {"--rollout-tp": str(tp), "--rollout-cp": str(cp)}
    if ranks % (tp * cp) == 0:
        assert resolve(said, {}, profile(ranks=ranks), SHAPE).rollout_tp == tp
    else:
        (line,) = errors(said, ranks=ranks)
        assert line.startswith(f"--rollout-tp {tp}")
        assert f"divides the {ranks} ranks" in line


def test_top_k_is_bounded_by_real_vocabulary() -> None:
    (line,) = errors({"--top-k": "401"})
    assert "1 to 400, the vocab_size of the model, of which its tokenizer knows 390" in line
    (line,) = errors({"--mix": "0.7,0.7/1/401"})
    assert line.startswith("--mix 0.7,0.7/1/401: allowed is top-k")
    # An id that the model has and the tokenizer does not is inside the real vocabulary.
    assert resolve({"--top-k": "395"}, {}, profile(), SHAPE).top_k == 395


def test_verify_needs_what_shows_an_update() -> None:
    assert "a one-step run cannot show that weights changed" in errors({"--steps": "1"})[0]
    assert "no weight changes" in errors({"--lr": "0"})[0]
    config = resolve({"--steps": "1", "--lr": "0"}, {}, profile(), SHAPE, command="run")
    assert (config.steps, config.lr) == (1, 0.0)


def test_sequence_fits_positions_and_cache() -> None:
    assert resolve({"--max-response-len": "1984"}, {}, profile(), SHAPE).max_response_len == 1984
    assert errors({"--max-response-len": "1985"})[0].startswith("--max-response-len 1985: allowed is 1 to 1984")
    # 128 tokens and the page that vLLM keeps, of 4 layers, 8 heads of 16, K and V in two bytes.
    assert resolve({}, {}, profile(engine={"kv_cache_bytes": 144 * 2048}), SHAPE).rollout_tp == 1
    (line,) = errors({}, engine={"kv_cache_bytes": 144 * 2048 - 1})
    assert "takes 294912 bytes of KV cache a rank" in line
    halves = resolve({"--rollout-tp": "2"}, {}, profile(engine={"kv_cache_bytes": 72 * 2048}), SHAPE)
    assert halves.rollout_tp == 2


def test_native_mode_refuses_what_the_stock_sampler_would_change() -> None:
    (line,) = errors({"--mode": "native", "--temperature": "0.005"})
    assert line.startswith("--temperature 0.005: native mode allows 0 and 0.01 to 2")
    (line,) = errors({"--mode": "native", "--mix": "0.7,3"})
    assert "lifts or refuses 3" in line
    assert resolve({"--mode": "native", "--temperature": "0"}, {}, profile(), SHAPE).temperature == 0
    assert resolve({"--temperature": "0.005"}, {}, profile(), SHAPE).temperature == 0.005


def test_default_that_breaks_a_rule_is_named() -> None:
    (line,) = errors({}, max_prompt_len=1600, defaults={})
    assert line.startswith("--max-response-len 512 (the default): allowed is 1 to 448")


def test_rollout_logprobs_are_never_reused_for_training() -> None:
    (line,) = errors({"--use-rollout-logprobs": True})
    assert line.startswith("--use-rollout-logprobs: not allowed in consistency mode")
    native = resolve({"--use-rollout-logprobs": True, "--mode": "native"}, {}, profile(), SHAPE)
    assert native.use_rollout_logprobs


def test_row_to_keep_needs_a_probe_and_a_place() -> None:
    (line,) = errors({"--probe-row": "norm@3/5"})
    assert line.startswith("--probe-row norm@3/5: allowed with --probe only")
    (line,) = errors({"--probe": True, "--probe-row": "norm"})
    assert "OP@SAMPLE/POSITION" in line
    assert resolve({"--probe": True, "--probe-row": "norm@3/5"}, {}, profile()).probe_row == "norm@3/5"


def test_detach_and_json_exclude_each_other() -> None:
    (line,) = errors({"--detach": True, "--json": True})
    assert line.startswith("--json: not allowed with --detach")


def test_mix_and_single_sampling_exclude_each_other() -> None:
    lines = errors({"--mix": "0.7,1.3", "--temperature": "1", "--top-k": "5"})
    assert [line.split(":")[0] for line in lines] == ["--temperature 1", "--top-k 5"]


def test_stronger_layer_decides_between_mix_and_single() -> None:
    mixed = profile(defaults={"mix": "0.7,1.3"})
    assert resolve({"--temperature": "1"}, {}, mixed).mix is None
    assert resolve({"--temperature": "1"}, {}, mixed).samplings == (Sampling(1.0),)
    single = profile(defaults={"temperature": 0.7})
    assert resolve({}, {"RLK_MIX": "0.5,1.3"}, single).samplings == (Sampling(0.5), Sampling(1.3))
