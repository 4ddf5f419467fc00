"""One rank's worker: our sampler, weights in place, event counters, and the read-back of live settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker

from rlk.kernels import policy as canonical
from rlk.kernels.collectives.connect import disconnect, settle
from rlk.kernels.proof import Proof
from rlk.kernels.proof_shared import prove_once
from rlk.model import checkpoint
from rlk.model.faults import ops_for, policy_for
from rlk.model.policy_probe import ProbedPolicy
from rlk.model.products import attention_shape, products
from rlk.plan.faults import Moment
from rlk.rollout.context_parallel import Partitioned
from rlk.rollout.faults import page_fault
from rlk.rollout.messages import Counters
from rlk.rollout.readback import worker_settings
from rlk.rollout.sampling import Applied, applied_of
from rlk.rollout.vllm_model import RolloutQwen3, plan_of
from rlk.rollout.vllm_sampler import CanonicalSampler


class RankWorker(Worker):  # type: ignore[misc]
    """Methods without an underscore are called by the engine through vLLM's collective_rpc."""

    distributed_init_method: str

    def init_device(self) -> None:
        """vLLM's start of a device, then the proof of the kernels, and our sampler in consistency mode."""
        if self.distributed_init_method == "env://":
            # What external_launcher passes. vLLM 0.26.0 names shared memory by what follows the last colon: with
            # nothing there, the ranks of two engines on one machine would meet in one segment.
            self.distributed_init_method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        super().init_device()
        self.plan = plan_of(self.vllm_config)
        self.proofs = self._prove()
        self.events = Counters()
        self.applied: dict[int, Applied] = {}
        self.moments: list[Moment] = []

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's load; then the model knows where to ask whose rows it computes, and our sampler draws for it."""
        super().load_model(*args, **kwargs)
        if self.plan.config.mode == "consistency":
            self._draw()
        self._model.request_ids = lambda: self.model_runner.input_batch.req_ids

    def _prove(self) -> tuple[Proof, ...]:
        plan, limits, device = self.plan, self.plan.profile.engine, self.model_runner.device
        shape, tp = plan.shape, plan.rollout.tp
        rows = {"rows": limits.max_num_batched_tokens, "head_rows": limits.max_num_seqs}
        own = () if device.type == "cpu" else products(shape, tp, **rows, backward=False)
        return prove_once(device, own, attention_shape(shape, tp, limits.block_size))

    def execute_model(self, scheduler_output: Any) -> Any:
        """vLLM's step, counted."""
        before = self._model.forwards
        if self._model.page_fault is not None:
            self._model.page_fault.resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        output = super().execute_model(scheduler_output)
        context = self._model.qwen3.context
        settle(context.tp, context.cp)  # what comes next reads sampled tokens on the host
        self._count(scheduler_output, replayed=self._model.forwards == before)
        if self.plan.config.mode == "native":
            self._note_stock_settings(scheduler_output)
        return output

    def counters(self) -> Counters:
        """Events of this worker; the engine adds what only it sees."""
        sampler = self._canonical_sampler
        partitioned = self._model.context_parallel.counts.steps
        return replace(self.events, sampler_calls=sampler.calls if sampler else 0, partitioned_steps=partitioned)

    def take_applied(self) -> dict[int, Applied]:
        """Settings that the sampler used since the last call, by sample id."""
        source = self._canonical_sampler or self
        taken, source.applied = source.applied, {}
        return taken

    def load_stored(self, shards: Mapping[str, NDArray[np.uint16]]) -> None:
        """Overwrites parameters in place: their addresses stay valid. The caller drops the prefix cache."""
        for name, words in shards.items():
            # A copy, since what comes out of Ray's object store is read-only, which torch does not take.
            self._model.load_stored({name: torch.from_numpy(np.array(words, np.uint16)).view(torch.bfloat16)})

    def reload(self, seed: int, probe: bool, keep: str | None) -> None:
        """Weights and counters as after the start, and the random state of a start with this seed."""
        self._model.reload()
        self._model.record(probe, keep)
        self.events, self.applied = Counters(), {}
        self._model.context_parallel.counts = Partitioned()
        if self._canonical_sampler:
            self._draw()
        set_random_seed(seed)

    def inject(self, name: str | None) -> None:
        """Applies a fault of rlk.plan.faults from now on, or none."""
        ops, ops_moment = ops_for(name, "rollout", "both")
        self._model.page_fault = fault = page_fault(name)
        self.moments = [moment for moment in (ops_moment, fault and fault.when) if moment]
        if self._canonical_sampler:
            self._model.use(ops)
            self._draw(name)

    def fault_at(self, step: int) -> None:
        """Tells an injected fault the step that begins."""
        for moment in self.moments:
            moment.step = step

    def disconnect(self) -> None:
        """Gives the transport back; all ranks of the engine are ended together."""
        context = self._model.qwen3.context
        disconnect(context.tp, context.cp)

    def take_probe(self) -> tuple[int, int, dict[str, NDArray[Any]]]:
        """First virtual shard held here, 0, and what was recorded since the last call; empty without a probe."""
        recorder = self._model.recorder
        return self._model.qwen3.context.shards.start, 0, recorder.take() if recorder else {}

    def fingerprints(self) -> dict[str, tuple[int, int]]:
        """This rank's part of the fingerprint of every exported tensor, by checkpoint name."""
        model = self._model.qwen3
        return checkpoint.fingerprints(model.params, model.weights, model.context)

    def settings(self) -> dict[str, Any]:
        """What this worker and its runner run with, see rlk.rollout.readback."""
        return worker_settings(self)

    def _draw(self, inject: str | None = None) -> None:
        """Takes our sampler in the place of vLLM's, recorded where the model is."""
        recorder = self._model.recorder
        rules, moment = policy_for(
            inject, "rollout", "both", inner=ProbedPolicy(canonical, recorder) if recorder else canonical
        )
        self.moments += [moment] if moment else []
        self.model_runner.sampler = CanonicalSampler(self.model_runner, rules)

    @property
    def _model(self) -> RolloutQwen3:
        model: RolloutQwen3 = self.model_runner.get_model()
        return model

    @property
    def _canonical_sampler(self) -> CanonicalSampler | None:
        sampler = self.model_runner.sampler
        return sampler if isinstance(sampler, CanonicalSampler) else None

    def _count(self, scheduler_output: Any, *, replayed: bool) -> None:
        if scheduler_output.total_num_scheduled_tokens == 0:
            steps = rows = partial = 0
        else:
            steps, rows = 1, self.model_runner.input_batch.num_reqs
            # The runner's own mark of rows whose sampled token it will throw away: their prompt is not complete yet.
            partial = int(self.model_runner.discard_request_mask.np[:rows].sum())
        e = self.events
        self.events = replace(
            e,
            steps=e.steps + steps,
            graph_replays=e.graph_replays + (steps if replayed else 0),
            chunks=e.chunks + partial,
            preemptions=e.preemptions + len(scheduler_output.preempted_req_ids or ()),
            generated_samples=e.generated_samples + len(scheduler_output.scheduled_new_reqs),
            generated_tokens=e.generated_tokens + rows - partial,
        )

    def _note_stock_settings(self, scheduler_output: Any) -> None:
        """The fields of vLLM's batch from which its stock sampler reads."""
        batch, vocabulary = self.model_runner.input_batch, self.plan.shape.vocab_size
        for request in scheduler_output.scheduled_new_reqs:
            i = batch.req_id_to_index[request.req_id]
            temperature, top_p, top_k = (x[i].item() for x in (batch.temperature_cpu, batch.top_p_cpu, batch.top_k_cpu))
            sample = int(request.req_id.partition("-")[0])  # vLLM appends random characters to the id it was given
            self.applied[sample] = applied_of(temperature, top_p, top_k, vocabulary)
