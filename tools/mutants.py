"""Mutation testing of the validator: each module of rlk/evidence against its own unit tests, in a copy of the tree.

A survivor is a change of the code that no test notices. Survivors that matter get a test; the others are explained in
docs/faults.md. Run by `make mutants`; a name of a module, and seconds for each, may be given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVIDENCE = "rlk/evidence"
TESTS = {
    f"{EVIDENCE}/bits.py": ("bits", "logprobs"),
    f"{EVIDENCE}/oracle.py": ("oracle",),
    f"{EVIDENCE}/seal.py": ("seal",),
    f"{EVIDENCE}/checks/oracle.py": ("oracle",),
    f"{EVIDENCE}/checks/logprobs.py": ("logprobs",),
    f"{EVIDENCE}/checks/coverage.py": ("coverage",),
    f"{EVIDENCE}/checks/weights.py": ("weights",),
    f"{EVIDENCE}/checks/metrics.py": ("metrics",),
    f"{EVIDENCE}/checks/settings.py": ("settings",),
    f"{EVIDENCE}/checks/structure.py": ("structure",),
    f"{EVIDENCE}/checks/processes.py": ("structure", "settings"),
    f"{EVIDENCE}/checks/trajectory.py": ("digest", "structure"),
    f"{EVIDENCE}/checks/tally.py": ("checks", "coverage"),
}
OWN = {"oracle": "tests/unit/test_oracle.py"}  # a module with a second file of tests
CONFIG = """[cosmic-ray]
module-path = "{module}"
timeout = 60.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def main() -> int:
    """Prints each module's counts and survivors; 0 even with survivors, since a person judges them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="parts of module names; all without one")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the product's environment")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each module")
    asked = parser.parse_args()
    copy = ROOT / "build" / "mutants"
    shutil.rmtree(copy, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "__pycache__", "*.safetensors")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skipped)
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    for module in TESTS:
        if not asked.modules or any(word in module for word in asked.modules):
            print(_one(copy, module, asked.python, asked.seconds), flush=True)
    return 0


def _one(copy: Path, module: str, python: str, seconds: float) -> str:
    files = [f"tests/unit/test_evidence_{name}.py" for name in TESTS[module]]
    files += [OWN[name] for name in TESTS[module] if name in OWN]
    config, session = copy / "mutants.toml", copy / f"{module.replace('/', '-')}.sqlite"
    config.write_text(CONFIG.format(module=module, python=python, tests=" ".join(files)))
    tool = [sys.executable, "-m", "cosmic_ray.cli"]
    subprocess.run([*tool, "init", config.name, session.name], cwd=copy, check=True)
    started = time.monotonic()
    try:
        subprocess.run([*tool, "exec", config.name, session.name], cwd=copy, check=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        shutil.copy(ROOT / module, copy / module)  # the mutant that was being tested
    dump = subprocess.run([*tool, "dump", session.name], cwd=copy, check=True, capture_output=True, text=True).stdout
    return "\n".join(_report(module, dump, time.monotonic() - started))


def _report(module: str, dump: str, seconds: float) -> list[str]:
    found = [json.loads(line) for line in dump.splitlines()]
    done = [(item, result) for item, result in found if result is not None]
    survivors = [(item, result) for item, result in done if result["test_outcome"] == "survived"]
    lines = [f"{module}: {len(survivors)} of {len(done)} survived, {len(found) - len(done)} not run, {seconds:.0f} s"]
    for item, result in survivors:
        place = item["mutations"][0]
        changed = [line for line in result["diff"].splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        lines.append(f"  line {place['start_pos'][0]}: {' => '.join(line[1:].strip() for line in changed)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
