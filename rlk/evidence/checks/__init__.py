"""The checks: one function each, by theme. `registry.py` lists them."""
