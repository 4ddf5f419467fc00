"""vLLM's configuration for a GPU, made on a machine without one: what it asks of the platform and of the compiled parts
is stood in for, in a process of its own.

It shows that the platform can be imported while vLLM looks for one, that the arguments of an engine are taken, and that
the communicator is one that vLLM captures graphs with. Nothing runs on a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, os, sys, types

def stand_in(name, **values):
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module

nothing = dict.fromkeys(
    "FA2_AVAILABLE FA3_AVAILABLE compile_flash_attn_varlen_func_from_specs fa_version_unsupported_reason "
    "flash_attn_varlen_func get_scheduler_metadata is_fa_version_supported".split()
)
stand_in("vllm._C_stable_libtorch")
stand_in("vllm.vllm_flash_attn", __path__=[], **nothing)
stand_in("vllm.vllm_flash_attn.flash_attn_interface", **nothing)

from pathlib import Path
from rlk.plan.config import RunConfig
from rlk.plan.derive import derive
from rlk.plan.profile import load_profile
from rlk.plan.shape import read_shape

profile = load_profile("hopper-small", Path()).model_copy(update={"ranks": 1})
plan = derive(RunConfig(tp=1, rollout_tp=1, max_response_len=96), profile, read_shape(profile.model))
os.environ.update(plan.engine_env)

from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import DeviceCapability

for name, value in {
    "get_device_capability": DeviceCapability(9, 0), "get_device_name": "a Hopper", "get_device_total_memory": 1 << 37,
    "device_count": 1, "has_device_capability": True,
}.items():
    setattr(CudaPlatform, name, classmethod(lambda cls, *_, answer=value, **__: answer))

from vllm.platforms import current_platform
from rlk.rollout.arguments import engine_arguments, rank_environment

os.environ.update(rank_environment(0, 1, int(sys.argv[1]), "cuda"))
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

load_general_plugins()
made = EngineArgs(**engine_arguments(plan)).create_engine_config()
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
print(json.dumps({
    "platform": type(current_platform).__qualname__,
    "backend": current_platform.dist_backend,
    "communicator": communicator.__qualname__,
    "captures": issubclass(communicator, CudaCommunicator),
    "graphs": str(made.compilation_config.cudagraph_mode),
    "sizes": made.compilation_config.cudagraph_capture_sizes,
    "planned": plan.graph_sizes,
    "async": made.scheduler_config.async_scheduling,
    "second runner": made.use_v2_model_runner,
}))
"""


def test_engine_arguments_are_taken_for_a_cuda_device() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "29500"], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["platform"], said["backend"]) == ("SharedCudaPlatform", "gloo")
    assert (said["communicator"], said["captures"]) == ("HostCommunicator", True)
    assert said["graphs"].endswith("FULL_DECODE_ONLY")
    assert said["sizes"] == said["planned"] != []
    assert (said["async"], said["second runner"]) == (False, False)
