"""Which implementation runs where there are several: a name in the environment, read once, never a fallback.

The environment is the channel because the choice must hold before the first product in every process of a run, whoever
started it, and because cuBLAS reads its own switches there too. `describe` is what the proof and the manifest record.
"""

from __future__ import annotations

import os
from functools import cache

from rlk.kernels.cuda.launch import INTERPRETED

SPLIT_K_OFF = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
"""Without a workspace cuBLAS cannot split K, which it otherwise does for few rows: then it leaves the chain."""

CHOICES = {
    "RLK_GEMM": {
        "cublas": "cuBLAS, split-K off",
        "cublas-fp32": "cuBLAS, split-K off, fp32 out, rounded by our kernel",
        "triton": "Triton",
    },
    "RLK_TREE": {
        "cublas": "cuBLAS, split-K off, a product a leaf, tree by our kernel",
        "triton": "Triton, leaves summed in registers",
    },
    "RLK_ATTENTION": {
        "fa3": "FlashAttention-3 of vLLM, one split; backward Triton",
        "triton": "Triton, tiles of 64 rows by 64 keys",
    },
}
"""RLK_GEMM: products that are one chain. RLK_TREE: products that are a tree over the leaves of virtual shards.
RLK_ATTENTION: attention, whose two choices are two numeric programs: bits of one are not those of the other."""


class KernelChoiceError(RuntimeError):
    """A name that does not exist, or one that this process was not started for."""


@cache
def chosen(variable: str) -> str:
    """The name in force for a variable: by default the first of CHOICES, in the interpreter always triton.

    Raises:
        KernelChoiceError: the name is unknown, or it is cuBLAS and split-K is not off.
    """
    names = CHOICES[variable]
    name = os.environ.get(variable) or ("triton" if INTERPRETED else next(iter(names)))
    allowed = ["triton"] if INTERPRETED else list(names)
    if name not in allowed:
        raise KernelChoiceError(f"{variable}={name}: allowed is {', '.join(allowed)}")
    if name.startswith("cublas"):
        for key, value in SPLIT_K_OFF.items():
            if os.environ.get(key) != value:
                raise KernelChoiceError(
                    f"{variable}={name} needs {key}={value}, got {os.environ.get(key)!r}: set it before Python starts, "
                    f"or {variable}=triton"
                )
    return name


def describe(variable: str) -> str:
    """The sentence that a manifest records for the choice in force."""
    return CHOICES[variable][chosen(variable)]
