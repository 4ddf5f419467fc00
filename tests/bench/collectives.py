"""The collectives beside NCCL, one process a GPU, on all visible GPUs (2, 4 or 8 of them).

python -m tests.bench.collectives OUT
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlk.kernels.collectives.ipc import IpcCollective
from tools.gpu.collectives import in_graph
from tools.gpu.ranks import on_processes

SIZES = (("8 KB", 1 << 11), ("1 MB", 1 << 18), ("32 MB", 1 << 23), ("128 MB", 1 << 25))


def work(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Microseconds of an fp32 all-reduce in a graph, in the order of the tree and in NCCL's."""
    ours = IpcCollective(group, "bench", device, timeout_s=30.0)
    nccl = dist.new_group(list(range(ours.size)), backend="nccl")
    found = {}
    for name, n in SIZES:
        t = torch.ones(n, device=device)
        found[name] = {
            "ipc_us": in_graph(partial(ours.gather_tree, t, name)),
            "nccl_us": in_graph(partial(dist.all_reduce, t, group=nccl)),
        }
    ours.close()
    return found


if __name__ == "__main__":
    count = torch.cuda.device_count()
    Path(sys.argv[1]).write_text(json.dumps(on_processes(1 << count.bit_length() - 1, work, 120)[0], indent=1) + "\n")
