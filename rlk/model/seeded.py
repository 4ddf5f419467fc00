"""Random weights for tests of a shape: drawn from a seed at first use, since they are too large for a repository.

Numbers of numpy's Philox by tensor name, so a tensor depends on the seed and on its name alone. Sizes keep activations
near 1 and give logits a deviation near 3. Rows of the ids that end a response are 3.5 times as long: then about one
context in twenty makes such an id the most probable one, and responses differ in length.
"""

from __future__ import annotations

import fcntl
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from rlk.model.layout import Tensor, parameters
from rlk.plan.shape import ModelShape

FILE = "model.safetensors"
LOGIT_DEVIATION = 3.0
END_FACTOR = 3.5


def ensure_weights(folder: Path, shape: ModelShape, seed: int) -> bool:
    """Writes the weights of a checkpoint folder that has none; returns whether it did. Processes take turns."""
    place = folder / FILE
    with open(folder / f"{FILE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return False
        partial = folder / f"{FILE}.partial"
        save_file(draw(shape, seed), partial, {"format": "pt", "seed": str(seed)})
        partial.rename(place)
        return True


def draw(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """Random bf16 tensors by checkpoint name."""
    tensors = [tensor for param in parameters(shape) for tensor in param.tensors]
    with ThreadPoolExecutor() as pool:  # numpy draws without Python's lock
        drawn = pool.map(lambda tensor: _draw(tensor, shape, seed), tensors)
        return {tensor.hf_name: value for tensor, value in zip(tensors, drawn, strict=True)}


def _draw(tensor: Tensor, shape: ModelShape, seed: int) -> torch.Tensor:
    generator = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(tensor.hf_name.encode())]))
    noise = torch.from_numpy(generator.standard_normal(tensor.shape, dtype=np.float32))
    if len(tensor.shape) == 1:
        return (1 + 0.1 * noise).to(torch.bfloat16)
    if tensor.kind not in ("head", "embedding"):
        return noise.mul_(tensor.width**-0.5).to(torch.bfloat16)
    if tensor.kind == "embedding" and not shape.tie_word_embeddings:
        return noise.to(torch.bfloat16)
    noise.mul_(LOGIT_DEVIATION * tensor.width**-0.5)
    noise[list(shape.eos_ids)] *= END_FACTOR
    return noise.to(torch.bfloat16)
