"""Rollout: vLLM engines that execute the canonical program, one rank a process. Nothing here imports vLLM on import."""
