"""Loads the suite's own plugin: hardware markers, cells, and what they leave in a JUnit report."""

from __future__ import annotations

pytest_plugins = ["tests.plugin"]
