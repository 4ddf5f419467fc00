"""One trainer rank as a process: its groups, its worker, and what it says about itself. The driver makes a Ray actor
of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from rlk.kernels.collectives.base import Alone, Collective
from rlk.kernels.collectives.connect import arena_bytes, connect, disconnect, transport_of
from rlk.kernels.devices import gpu_name, release_cached
from rlk.kernels.proof import Proof
from rlk.kernels.proof_shared import prove_once
from rlk.model.parallel import ParallelContext
from rlk.model.products import attention_shape, products
from rlk.plan.derive import Plan
from rlk.train.batching import Sample
from rlk.train.optimizer import UpdateReport
from rlk.train.worker import ScoredTokens, TrainWorker

HOST = "127.0.0.1"  # all trainer ranks of one run are on one machine


class TrainRank:
    """Rank tp_rank * CP + cp_rank of the trainer. Calls that exchange data must reach all ranks."""

    def __init__(self, plan_json: str, rank: int) -> None:
        self.plan = Plan.from_json(plan_json)
        self.rank = rank
        self._groups: list[dist.ProcessGroup] = []

    def open_store(self) -> int:
        """Rank 0 only: opens the meeting point and returns its port, chosen by the system, so that none can be
        taken."""
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=self._timeout())
        return int(self._store.port)

    def start(self, port: int) -> dict[str, Any]:
        """Joins the groups, proves the kernels, loads the checkpoint; returns `read_back()`."""
        torch.set_num_threads(1)
        if self.rank:
            self._store = TCPStore(HOST, port, is_master=False, timeout=self._timeout())
        dist.init_process_group(
            "gloo", store=self._store, rank=self.rank, world_size=self.plan.ranks, timeout=self._timeout()
        )
        self.proofs = self._prove()
        self.worker = TrainWorker(self.plan, self._context())
        return self.read_back()

    def _prove(self) -> tuple[Proof, ...]:
        plan, device = self.plan, torch.device(self.plan.profile.device)
        most = max(plan.logical_budget, plan.max_model_len)  # a longer sample is a micro-batch of its own
        own = products(plan.shape, plan.train.tp, rows=most, head_rows=most, backward=plan.config.mode == "consistency")
        heads = attention_shape(plan.shape, plan.train.tp, plan.profile.engine.block_size)
        return prove_once(device, () if device.type == "cpu" else own, heads)

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.plan.profile.timeouts.collective_s)

    def _context(self) -> ParallelContext:
        tp, cp = self.plan.train.tp, self.plan.train.cp
        tp_groups = [[t * cp + c for t in range(tp)] for c in range(cp)]
        cp_groups = [[t * cp + c for c in range(cp)] for t in range(tp)]
        return ParallelContext(self._group("tensor parallel", tp_groups), self._group("context parallel", cp_groups))

    def _group(self, name: str, members: list[list[int]]) -> Collective:
        mine: Collective = Alone()
        for ranks in members:  # every process takes part in making every group
            group = dist.new_group(ranks, timeout=self._timeout())
            if self.rank in ranks:
                self._groups.append(group)
            if self.rank in ranks and len(ranks) > 1:
                words = f"{name} group of train ranks {ranks}"
                mine = connect(self.plan.transport, group, words, self.plan.profile.timeouts.collective_s)
        return mine

    def move(self, plan_json: str) -> dict[str, Any]:
        """Back to the initial state, byte for byte, for a run of another plan; returns `read_back()`. For another
        topology all ranks leave their groups and form those of it.

        Raises:
            ValueError: the plan needs another number of ranks.
        """
        plan = Plan.from_json(plan_json)
        if plan.ranks != self.plan.ranks:
            raise ValueError(f"this trainer has {self.plan.ranks} ranks: a plan of {plan.ranks} needs one of its own")
        moved, self.plan = plan.train != self.plan.train, plan
        if moved:
            disconnect(self.worker.context.tp, self.worker.context.cp)
            self._leave_groups()
            self.proofs = self._prove()
        context = self._context() if moved else self.worker.context
        del self.worker  # its memory goes before the next one takes as much
        release_cached(torch.device(plan.profile.device))
        self.worker = TrainWorker(plan, context)
        return self.read_back()

    def _leave_groups(self) -> None:
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def score(self, samples: Sequence[Sample]) -> tuple[ScoredTokens, npt.NDArray[np.float32]]:
        """Takes a step's samples; recomputed policy log-probabilities and those of the reference, of this rank's
        tokens."""
        self.worker.begin(samples)
        return self.worker.score(), self.worker.score_reference()

    def update(
        self, coefficients: Mapping[int, npt.NDArray[np.float32]]
    ) -> tuple[npt.NDArray[np.float32], UpdateReport]:
        """See TrainWorker.update."""
        return self.worker.update(coefficients)

    def update_fingerprints(self) -> dict[str, dict[str, tuple[int, int]]]:
        """See TrainWorker.update_fingerprints."""
        return self.worker.update_fingerprints()

    def take_probe(self) -> tuple[int, int, dict[str, npt.NDArray[Any]]]:
        """See TrainWorker.take_probe."""
        return self.worker.take_probe()

    def offload(self) -> None:
        """See TrainWorker.offload."""
        self.worker.offload()

    def restore(self) -> None:
        """See TrainWorker.restore."""
        self.worker.restore()

    def export(self) -> dict[str, npt.NDArray[np.uint16]]:
        """The words of the stored shards held here, on the host; every context-parallel rank holds the same."""
        weights = self.worker.model.weights
        return {name: w.cpu().contiguous().view(torch.uint16).numpy() for name, w in weights.items()}

    def described(self) -> list[tuple[str, int, str]]:
        """Name, elements held here and dtype of every exported part."""
        return self.worker.described()

    def fingerprints(self) -> dict[str, tuple[int, int]]:
        """This rank's part of every exported tensor's fingerprint."""
        return self.worker.fingerprints()

    def read_back(self) -> dict[str, Any]:
        """Effective settings, from the live objects."""
        worker, context = self.worker, self.worker.context
        (dtype,) = {str(w.dtype).removeprefix("torch.") for w in worker.model.weights.values()}
        (master,) = {str(w.dtype).removeprefix("torch.") for w in worker.optimizer.master.values()}
        return {
            "pid": os.getpid(),
            "rank": dist.get_rank(),
            "tp_rank": context.tp.rank,
            "cp_rank": context.cp.rank,
            "tp": context.tp.size,
            "cp": context.cp.size,
            "mode": "native" if worker.model.ops.name == "native" else "consistency",
            "dtype": dtype,
            "master_dtype": master,
            "token_budget": worker.plan.token_budget,
            "padded_vocab": worker.model.weights["embed"].flatten(0, 1).shape[0] * context.tp.size,
            "device": worker.model.weights["embed"].device.type,
            "gpu": gpu_name(worker.device),
            "transport": transport_of(context.tp, context.cp),
            "offload": worker.residence.offloads > 0,
            "holdings": (*worker.holdings(), self._arenas()),
            "freed_bytes": worker.residence.freed_bytes,
            "model_class": f"{type(worker.model).__module__}.{type(worker.model).__qualname__}",
            "kernels": {p.name: p.form for p in self.proofs},
        }

    def _arenas(self) -> dict[str, Any]:
        context = self.worker.context
        return {"name": "arenas", "bytes": arena_bytes(context.tp, context.cp), "during_rollout": "resident"}

    def proof_sentences(self) -> list[tuple[str, str, str]]:
        """Name, form and proof of every kernel choice."""
        return [(p.name, p.form, p.sentence) for p in self.proofs]

    def stop(self) -> None:
        """Leaves the groups."""
        dist.destroy_process_group()
