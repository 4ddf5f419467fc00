"""One rank of one vLLM engine: the class that the driver makes a Ray actor of."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.kernels.devices import release_cached
from rlk.plan.derive import Plan
from rlk.plan.faults import injection, moment
from rlk.rollout.arguments import (
    engine_arguments,
    engine_seed,
    environment_errors,
    rank_environment,
    same_engine,
    setting_errors,
)
from rlk.rollout.messages import Counters, Generation, Request, RolloutError
from rlk.rollout.readback import process_settings, scheduler_settings
from rlk.rollout.results import as_arrays
from rlk.rollout.sampling import Applied, expected, parameters

Bits = NDArray[np.uint16]


class EngineRank:
    """All ranks get the same calls in the same order: each schedules for itself and takes the same steps."""

    def __init__(self, plan_json: str, engine: int, rank: int, world: int, master_port: int) -> None:
        """Keeps its place; vLLM is imported by `start`.

        Raises:
            RolloutError: the plan has another number of ranks, or the process lacks a variable that it asks for.
        """
        self._take_place(plan_json, engine, rank, world, master_port)
        self._live: Any = None
        self._seconds: dict[str, float] = {}

    def _take_place(self, plan_json: str, engine: int, rank: int, world: int, master_port: int) -> None:
        self.plan = Plan.from_json(plan_json)
        self.engine, self.rank = engine, rank
        if world != self.plan.engine_ranks or not 0 <= rank < world:
            raise RolloutError(f"rank {rank} of {world}: the plan has {self.plan.engine_ranks} ranks an engine")
        errors = environment_errors(self.plan, os.environ)
        if errors:
            raise RolloutError("; ".join(errors))
        os.environ.update(rank_environment(rank, world, master_port, self.plan.profile.device))
        self._cached_tokens = 0
        self._applied: set[Applied] = set()
        self._loading, self._version = False, 0

    def start(self) -> dict[str, Any]:
        """Imports vLLM, builds the engine, and returns `read_back()`. Ranks of one engine wait here for each other.

        Raises:
            RolloutError: the live engine shows settings other than the plan's.
        """
        with self._timed("import"), _collector_off():
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        with self._timed("build"):
            # What vllm.LLM wraps: without the wrapper's imports for chat and pooling a rank starts .8 s sooner.
            self._live = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(self.plan)))
        readback = self.read_back()
        if self._injected():
            self._rpc("inject", self._injected())
        errors = setting_errors(self.plan, readback)
        if errors:
            raise RolloutError("; ".join(errors))
        return readback

    def generate(self, step: int, requests: Sequence[Request], weight_version: int) -> Generation:
        """Generates all requests; returns when the last one ended.

        Raises:
            RolloutError: weights were loaded and not committed, or another version was; a sample id comes twice; vLLM
                took longer than the profile's rollout_s or ended a request for a reason that is not ours; the sampler
                applied other settings than a request's.
        """
        if self._loading:
            raise RolloutError(
                "weights were loaded but not committed: cached keys and values are those of older ones: call commit"
            )
        if weight_version != self._version:
            raise RolloutError(f"weight version {weight_version} was asked for: this engine holds {self._version}")
        if len({request.sample_id for request in requests}) != len(requests):
            raise RolloutError(f"step {step}: a sample id comes twice: allowed is once in a run")
        if self._injected():
            self._rpc("fault_at", step)
        outputs = self._run(requests)
        self._check_applied(requests)
        return Generation(self.engine, self.rank, step, as_arrays(requests, outputs, weight_version))

    def load(self, shards: Mapping[str, Bits]) -> None:
        """Overwrites parameters in place. An update may come in as many calls as the sender likes; `commit` ends it.

        shards: bf16 words by stored name, in this rank's stored shape (rlk.model.layout): [S, rows, cols], or [n].
        """
        self._loading = True
        self._rpc("load_stored", shards)

    def commit(self, version: int) -> None:
        """Ends an update: drops cached keys and values, and names the weights that are now live.

        Raises:
            RolloutError: requests are running, so that vLLM kept its cache.
        """
        if not self._keeps_cache(version) and not self._vllm.reset_prefix_cache():
            raise RolloutError(f"version {version}: vLLM kept its prefix cache: finish all requests before an update")
        self._loading, self._version = False, version

    def _keeps_cache(self, version: int) -> bool:
        """Whether a fault that was asked for leaves older keys and values in place of an update."""
        when = moment(self._injected(), ("cache",), ("rollout",))
        return when is not None and version > 0 and when.injection.acts(version - 1)

    def _injected(self) -> str | None:
        """The fault that acts in this engine: one of the rollout side acts in engine 0 alone."""
        inject = self.plan.config.inject
        everywhere = inject is not None and injection(inject).fault.side == "both"
        return inject if self.engine == 0 or everywhere else None

    def reset(self, plan_json: str) -> None:
        """Weights, version, counters, random state and prefix cache as after the start, for a run of another plan.

        Raises:
            RolloutError: the plan needs an engine of other settings; those of the sampler and the seed may differ.
        """
        plan = Plan.from_json(plan_json)
        if not same_engine(plan, self.plan):
            raise RolloutError(f"{plan.cell}: mode, model, topology or limits are not this engine's: start one for it")
        self.plan = plan
        self._loading = True
        self._rpc("reload", engine_seed(plan), plan.config.probe, plan.config.probe_row)
        self._rpc("inject", self._injected())
        self._cached_tokens, self._applied = 0, set()
        self.commit(0)

    def move(self, plan_json: str, engine: int, rank: int, world: int, master_port: int) -> dict[str, Any]:
        """Initial state for a run of any plan of the same profile; returns `read_back()`. Where the plan needs another
        engine, this rank leaves its own and takes its place in that one: see `__init__` and `start`."""
        if same_engine(Plan.from_json(plan_json), self.plan) and (engine, rank) == (self.engine, self.rank):
            self.reset(plan_json)
            return self.read_back()
        self._rpc("disconnect")
        self.stop()
        gc.collect()  # vLLM's objects refer to each other: the memory of the old engine goes before the new one is made
        release_cached(torch.device(self.plan.profile.device))
        self._take_place(plan_json, engine, rank, world, master_port)
        return self.start()

    def fingerprint(self) -> dict[str, tuple[int, int]]:
        """This rank's part of the fingerprint of every exported tensor, by checkpoint name, from the live weights.

        Parts of tensor-parallel ranks add up, modulo 2^64; a replicated tensor is whole on each and counts once.
        """
        parts: dict[str, tuple[int, int]] = self._rpc("fingerprints")
        return parts

    def take_probe(self) -> tuple[int, int, dict[str, NDArray[Any]]]:
        """First virtual shard, 0, and what this rank recorded since the last call, see rlk.evidence.probe."""
        taken: tuple[int, int, dict[str, NDArray[Any]]] = self._rpc("take_probe")
        return taken

    def counters(self) -> dict[str, int]:
        """Events since the start or the last reset, see rlk.rollout.messages.Counters."""
        counted: Counters = self._rpc("counters")
        return replace(counted, cached_tokens=self._cached_tokens).as_dict()

    def read_back(self) -> dict[str, Any]:
        """Effective settings, read from live objects: process, worker, scheduler, sampling applied, seconds spent."""
        return {
            "engine": self.engine,
            "process": process_settings(),
            "worker": self._rpc("settings"),
            "scheduler": scheduler_settings(self._vllm),
            "sampling": [a._asdict() for a in sorted(self._applied)],
            "seconds": dict(self._seconds),
        }

    def stop(self) -> None:
        """Ends the engine and its process groups; the process may then start another."""
        if self._live is not None:
            self._live.engine_core.shutdown()
            self._live = None

    @property
    def _vllm(self) -> Any:
        if self._live is None:
            raise RolloutError(f"engine {self.engine} rank {self.rank} is not running: call start first")
        return self._live

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._vllm.collective_rpc(method, args=args)[0]

    def _run(self, requests: Sequence[Request]) -> dict[int, Any]:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # All parameters before the first request: a refusal must leave nothing behind in the scheduler.
        only_final = RequestOutputKind.FINAL_ONLY
        params = [SamplingParams(**parameters(request, self.plan), output_kind=only_final) for request in requests]
        for request, sampling_params in zip(requests, params, strict=True):
            prompt = tokens_input(list(request.prompt_tokens))
            self._vllm.add_request(str(request.sample_id), prompt, sampling_params)
        outputs: dict[int, Any] = {}
        limit = self.plan.profile.timeouts.rollout_s
        deadline = time.monotonic() + limit
        while self._vllm.has_unfinished_requests():
            if time.monotonic() > deadline:
                waiting = [r.sample_id for r in requests if r.sample_id not in outputs]
                raise RolloutError(f"{len(waiting)} samples unfinished after {limit} s, the first is {waiting[0]}")
            outputs |= {int(output.request_id): output for output in self._vllm.step() if output.finished}
        self._cached_tokens += sum(output.num_cached_tokens for output in outputs.values())
        return outputs

    def _check_applied(self, requests: Sequence[Request]) -> None:
        applied = self._rpc("take_applied")
        self._applied |= set(applied.values())
        for request in requests:
            asked, used = expected(request.sampling, self.plan), applied.get(request.sample_id)
            if used != asked:
                raise RolloutError(f"sample {request.sample_id}: asked for {asked}, the sampler applied {used}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = round(time.perf_counter() - start, 3)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Nothing of an import is garbage: without the collector vLLM's takes 17 % less time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
