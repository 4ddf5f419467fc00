"""Canonical numerics: one declared order of operations for every op, whatever the topology."""
