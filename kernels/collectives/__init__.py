"""Transports. They move bytes; the arithmetic of a reduction is rlk.kernels.tree, the same over every transport."""
