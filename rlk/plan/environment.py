"""Environment variables of the actors. Nothing else of the caller's environment decides a number."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]

_EVERYWHERE = {
    "OMP_NUM_THREADS": "1",  # many ranks share few cores; the kernels bring their own order
    "TORCHDYNAMO_DISABLE": "1",  # else the first generate compiles for 5 to 25 s
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in the actor: one process a rank
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner has another sampler class and refuses prefill CP
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ENGINE_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding fails beyond one rank
    "RLK_PLATFORM": "cpu",  # switches our vLLM CPU platform plugin on
}
_ENGINE_CUDA = {
    "VLLM_DISABLE_PYNCCL": "1",  # NCCL refuses two ranks on one device
    "RLK_PLATFORM": "cuda",  # switches our vLLM CUDA platform plugin on: gloo between ranks
}
# Without these cuBLAS splits K at small M, which is another order of additions.
_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def train_environment(device: Device) -> dict[str, str]:
    """Variables of a train rank, set before its Python starts."""
    return {**_EVERYWHERE, **(_CUDA if device == "cuda" else {})}


def engine_environment(device: Device) -> dict[str, str]:
    """Variables of an engine rank, set before its Python starts."""
    return {**_EVERYWHERE, **_ENGINE, **({**_CUDA, **_ENGINE_CUDA} if device == "cuda" else _ENGINE_CPU)}
