"""The independent oracle: the plain Hugging Face model in float64 on the weights that the trainer exported.

It runs in the driver's process, which is idle while ranks start and which never imports vLLM. transformers is imported
here and nowhere else in the package, and only once it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk.driver.sync import Bits, recut
from rlk.evidence.arrays import OracleArrays
from rlk.evidence.digest import weights_hash
from rlk.evidence.oracle import Expected, expect, looked_at, uniform
from rlk.evidence.samples import Samples
from rlk.kernels.state import as_hex, fingerprint
from rlk.model.checkpoint import exported
from rlk.model.layout import parameters
from rlk.model.parallel import ParallelContext
from rlk.plan.derive import Plan
from rlk.plan.shape import ModelShape


def apart() -> ThreadPoolExecutor:
    """The thread that the oracle computes in while the driver waits for ranks. They need cores to feed their GPUs, and
    torch's threads wait for each other by spinning: so it takes a quarter of what is there."""
    own = max(1, (os.cpu_count() or 1) // 4)
    return ThreadPoolExecutor(1, "oracle", torch.set_num_threads, (own,))


class Oracle:
    """Qwen3ForCausalLM as transformers defines it, from the checkpoint's own config.json. RMSNorm and the angles of
    RoPE are fp32 in it even when the model is float64: 2^-24, where the engines' bf16 has 2^-9."""

    def __init__(self, plan: Plan) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        self.plan = plan
        config = Qwen3Config.from_pretrained(Path(plan.profile.model))
        with torch.device("meta"):  # its own random weights would take minutes for billions of them
            network = Qwen3ForCausalLM(config).to(torch.float64).eval()
        self._network = network.to_empty(device="cpu")
        self._network.model.rotary_emb = Qwen3RotaryEmbedding(config).to(torch.float64)  # no checkpoint has its table
        self._weights = ""

    def serve(self, plan: Plan) -> None:
        """Takes the plan of the next run, which has the same model."""
        self.plan = plan

    def load(self, exports: Sequence[Mapping[str, Bits]]) -> None:
        """Takes the weights of one version: words of stored shards, by tensor-parallel rank of the trainer."""
        tensors = assembled(self.plan.shape, recut(exports, 1)[0])
        self._weights = weights_hash(_fingerprints(self.plan.shape, tensors))
        if self.plan.shape.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        self._network.load_state_dict(tensors, strict=True)  # bf16 words become float64, exactly

    @property
    def weights(self) -> str:
        """The hash of the weights that were taken last, as the trajectory hashes them."""
        return self._weights

    def look(self, step: int, samples: Samples) -> OracleArrays:
        """What the rules say of this step's tokens, one forward pass a sample that is looked at."""
        pairs = looked_at(step, samples.logprobs_by_row(), len(self.plan.config.samplings))
        found: list[tuple[Any, ...]] = []
        for row in sorted({row for row, _ in pairs}):
            indices = [index for at, index in pairs if at == row]
            found += [
                self._row(step, samples, row, index, logits) for index, logits in self._logits(samples, row, indices)
            ]
        columns = [np.array(column) for column in zip(*found, strict=True)]
        names = OracleArrays.dtypes()
        return OracleArrays(**{n: c.astype(names[n]) for n, c in zip(names, columns, strict=True)})

    def _logits(self, samples: Samples, row: int, indices: Sequence[int]) -> list[tuple[int, list[float]]]:
        prompt, response = samples.prompt(row), samples.tokens[samples.response(row)]
        ids = torch.from_numpy(np.concatenate([prompt, response[: max(indices)]])).long()
        kept = torch.tensor([len(prompt) - 1 + index for index in indices])  # of the rest no logits are formed
        with torch.no_grad():
            logits = self._network(ids[None], logits_to_keep=kept).logits[0, :, : self.plan.shape.vocab_size]
        return list(zip(indices, logits.tolist(), strict=True))

    def _row(self, step: int, samples: Samples, row: int, index: int, logits: list[float]) -> tuple[Any, ...]:
        sample = int(samples.sample_id[row])
        token = int(samples.tokens[samples.response(row)][index])
        sampling = self.plan.sampling_of(sample - step * self.plan.samples_per_step)
        said: Expected = expect(logits, token, sampling)
        settings = (sampling.temperature, sampling.top_p, sampling.top_k)
        draw = uniform(self.plan.config.seed, sample, int(samples.prompt_len[row]) + index)
        return (sample, index, token, *settings, *astuple(said), draw)


def assembled(shape: ModelShape, shards: Mapping[str, Bits]) -> dict[str, torch.Tensor]:
    """Whole tensors, bf16, by checkpoint name, from stored parameters that hold all virtual shards."""
    params = parameters(shape)
    stored = {name: torch.from_numpy(_own(words)).view(torch.bfloat16) for name, words in shards.items()}
    out = {t.hf_name: torch.empty(t.shape, dtype=torch.bfloat16) for p in params for t in p.tensors}
    for tensor, r, part in exported(params, stored, ParallelContext()):
        whole = out[tensor.hf_name].view(-1, tensor.width)
        whole[r.row0 : r.row0 + part.shape[0], r.col0 : r.col0 + part.shape[1]] = part
    return out


def _own(words: Bits) -> Bits:
    """The array, or a copy of what Ray's object store lends for reading, which torch does not take."""
    return words if words.flags.writeable else words.copy()


def _fingerprints(shape: ModelShape, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of the assembled tensors, so that a piece which was put in the wrong place shows."""
    widths = {t.hf_name: t.width for p in parameters(shape) for t in p.tensors}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # the kernel runs without Python's lock
        found = pool.map(lambda item: fingerprint(item[1].view(-1, widths[item[0]])), tensors.items())
        return dict(zip(tensors, map(as_hex, found), strict=True))
