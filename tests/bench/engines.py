"""Two engines with one way to decode a batch, rlk's and vLLM's own, and the clock on their steps."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlk.driver.ports import ReservedPorts
from rlk.plan.derive import Plan
from tests.bench.step_sizes import Decode

WARM = 6
"""Steps of a kind that are not counted at the beginning of a batch."""


@dataclass(frozen=True)
class Step:
    """Seconds from the end of the step before to its own, and what the scheduler put in it."""

    seconds: float
    requests: int
    tokens: int


class StepClock:
    """Stands between a running LLMEngine and its caller, and between it and its scheduler."""

    def __init__(self, engine: Any) -> None:
        scheduler = engine.engine_core.engine_core.scheduler
        self._step, self._schedule = engine.step, scheduler.schedule
        engine.step, scheduler.schedule = self.step, self.schedule
        self._scheduled, self._end = (0, 0), time.perf_counter()
        self._steps: list[Step] = []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The scheduler's, noted."""
        out = self._schedule(*args, **kwargs)
        self._scheduled = len(out.num_scheduled_tokens), out.total_num_scheduled_tokens
        return out

    def step(self) -> Any:
        """The engine's, timed: with one model step in flight or two, from one end to the next."""
        self._scheduled = (0, 0)
        out, end = self._step(), time.perf_counter()
        self._steps.append(Step(end - self._end, *self._scheduled))
        self._end = end
        return out

    def begin(self) -> None:
        """Forgets what was."""
        self._steps, self._end = [], time.perf_counter()

    def told(self, case: Decode, batched: int) -> dict[str, Any]:
        """Medians of the steps since `begin` that decoded all requests, and of those that were full of prompt tokens.

        Raises:
            AssertionError: no step decoded all requests.
        """
        n = case.requests
        decoding = [s.seconds for s in self._steps if s.requests == s.tokens == n][WARM:]
        filling = [s.seconds for s in self._steps if s.tokens == batched > n][WARM:]
        if not decoding:
            raise AssertionError(f"{case}: none of {len(self._steps)} steps decoded all requests")
        said = {**case.described(), "decode_steps": len(decoding), "decode_ms": _ms(median(decoding))}
        said |= {"decode_ms_least": _ms(min(decoding)), "decode_tokens_per_s": round(n / median(decoding))}
        if filling:
            tokens = round(batched / median(filling))
            said |= {"prefill_steps": len(filling), "prefill_ms": _ms(median(filling)), "prefill_tokens_per_s": tokens}
        return said


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def prompts(case: Decode, vocabulary: int, first: int) -> list[list[int]]:
    """Tokens of the requests `first`, `first` + 1, ...: no two begin alike, so nothing is found in a prefix cache."""
    draws = [random.Random(i) for i in range(first, first + case.requests)]
    return [[draw.randrange(vocabulary - 1) for _ in range(case.context)] for draw in draws]


class Product:
    """rlk.rollout.engine.EngineRank, alone in its engine."""

    def __init__(self, plan: Plan) -> None:
        from rlk.rollout.engine import EngineRank

        self.plan = plan
        ports = ReservedPorts(1)
        self.rank = EngineRank(plan.to_json(), 0, 0, 1, *ports.numbers)
        from rlk.rollout.vllm_platform import register

        register()  # as the entry point does, where this checkout is installed
        self.rank.start()
        ports.release()
        self.clock = StepClock(self.rank._live)

    def facts(self) -> dict[str, Any]:
        """What it runs with, from the live engine."""
        said = self.rank.read_back()
        scheduler, worker = said["scheduler"], said["worker"]
        taken = ("runner", "sampler", "ops", "attention", "attention_core", "graphs", "async_scheduling", "kernels")
        return {"graph_sizes": scheduler["graph_sizes"], **{name: worker[name] for name in taken}}

    def decode(self, case: Decode, first: int) -> dict[str, Any]:
        """Runs a batch; how many of its steps replayed a graph."""
        from rlk.rollout.messages import Request

        asked = enumerate(prompts(case, self.plan.shape.vocab_size, first), first)
        requests = [Request(i, 0, tokens, case.sampling, case.new) for i, tokens in asked]
        before = self.rank.counters()
        self.clock.begin()
        self.rank.generate(0, requests, 0)
        after = self.rank.counters()
        return {name: after[name] - before[name] for name in ("steps", "graph_replays")}


class Stock:
    """vLLM's own model of the same checkpoint, in this process, with the product's limits."""

    def __init__(self, plan: Plan, *, default: bool) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        limits, sizes = plan.profile.engine, list(_captured(plan))
        alike = {
            "block_size": limits.block_size,
            "async_scheduling": False,
            "attention_backend": "TRITON_ATTN",
            "disable_cascade_attn": True,
            "compilation_config": {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes,
            },
        }  # fmt: skip
        self.plan = plan
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=plan.profile.model, dtype="bfloat16", skip_tokenizer_init=True, generation_config="vllm",
                logprobs_mode="processed_logprobs", max_model_len=plan.max_model_len, max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens, kv_cache_memory_bytes=limits.kv_cache_bytes,
                gpu_memory_utilization=0.01, disable_log_stats=True, **({} if default else alike),
            )
        )  # fmt: skip
        self.clock = StepClock(self.engine)

    def facts(self) -> dict[str, Any]:
        """What it runs with, from the live engine's configuration."""
        config = self.engine.vllm_config
        compiled, layers = config.compilation_config, config.compilation_config.static_forward_context.values()
        return {
            "second_runner": bool(config.use_v2_model_runner),
            "attention": sorted({x.attn_backend.get_name() for x in layers if hasattr(x, "attn_backend")}),
            "compilation_mode": str(compiled.mode),
            "cudagraph_mode": str(compiled.cudagraph_mode),
            "graph_sizes": list(compiled.cudagraph_capture_sizes or ()),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "enforce_eager": bool(config.model_config.enforce_eager),
        }

    def decode(self, case: Decode, first: int) -> dict[str, Any]:
        """Runs a batch."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        s = case.sampling
        params = SamplingParams(
            temperature=s.temperature, top_p=s.top_p, top_k=max(s.top_k, 0), max_tokens=case.new, ignore_eos=True,
            detokenize=False, logprobs=0 if case.logprobs else None, flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        for i, tokens in enumerate(prompts(case, self.plan.shape.vocab_size, first), first):
            self.engine.add_request(str(i), tokens_input(tokens), params.clone())
        self.clock.begin()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {}


def _captured(plan: Plan) -> tuple[int, ...]:
    return plan.graph_sizes or (1,)
