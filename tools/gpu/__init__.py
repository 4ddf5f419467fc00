"""Steps of tools/gpu_check.py."""
