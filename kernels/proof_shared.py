"""One proof for all processes of a node that ask for the same one: a GPU that eight ranks share proves it once.

The proof is about a machine, its libraries and the sizes of a model, all of which are the same in the processes of one
node. Who comes first proves and leaves the sentences in a folder of the session; the others wait for it, and are told.
A process whose environment names no folder proves for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from rlk.kernels.devices import gpu_name
from rlk.kernels.proof import AttentionShape, Product, Proof, prove

FOLDER = "RLK_PROOFS"
"""Variable with the session's folder. It must not outlive the session: nothing proved before is believed later."""
SWITCHES = ("RLK_", "CUBLAS", "TRITON_")


def prove_once(device: torch.device, products: Sequence[Product], shape: AttentionShape) -> tuple[Proof, ...]:
    """See rlk.kernels.proof.prove: run here, or by the process of this node that asked for the same one first.

    Raises:
        ProofError: names the kernel; a failure is never shared, so every process that needs the kernel stops.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return prove(device, products, shape)
    place = Path(folder) / f"{_key(device, products, shape)}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return tuple(Proof(**entry) for entry in json.loads(place.read_text()))
        proofs = prove(device, products, shape)
        place.write_text(json.dumps([asdict(proof) for proof in proofs]))
        return proofs


def _key(device: torch.device, products: Sequence[Product], shape: AttentionShape) -> str:
    """Everything that decides which kernels run: the kind of GPU, the libraries, the switches and the sizes."""
    kind = gpu_name(device)
    model = None if kind is None else kind.rpartition(" ")[0]
    switches = {k: v for k, v in sorted(os.environ.items()) if k.startswith(SWITCHES) and k != FOLDER}
    sizes = [asdict(product) for product in products]
    said = [device.type, model, torch.__version__, torch.version.cuda, switches, sizes, asdict(shape)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]
