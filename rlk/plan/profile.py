"""A machine and its model: what a command line need not repeat. Read from .rlk-profile.json or embedded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlk.plan.errors import ConfigErrors, shown
from rlk.plan.shape import ModelShape, read_shape
from rlk.plan.topology import DEGREES

__all__ = ["EngineLimits", "ModelShape", "Profile", "Timeouts", "load_profile", "read_shape"]

PROFILE_FILE = ".rlk-profile.json"
DEFAULT_PROFILE = "tiny-cpu"
_EMBEDDED = Path(__file__).parent / "profiles"
_REPOSITORY = Path(__file__).parents[2]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class EngineLimits(BaseModel):
    """What one vLLM engine may take."""

    model_config = _STRICT

    max_engines: int = Field(8, ge=1)
    """Most engines that are started, however many would fit the ranks."""
    kv_cache_bytes: int = Field(ge=1)
    """Bytes of KV cache a rank."""
    max_num_seqs: int = Field(16, ge=1)
    """Requests that an engine decodes at once."""
    max_num_batched_tokens: int = Field(ge=1)
    """Tokens of one engine step: a longer prompt is prefilled in chunks."""
    block_size: int = Field(16, ge=8, multiple_of=8)
    """Tokens of a KV page; a multiple of 8, so that every rollout CP can share a page evenly."""

    @model_validator(mode="after")
    def _tokens_for_every_request(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens must be at least max_num_seqs {self.max_num_seqs}")
        return self


class Timeouts(BaseModel):
    """Seconds after which a wait ends with an error that names who was waited for."""

    model_config = _STRICT

    start_s: int = Field(300, ge=1)
    """For all ranks of the trainer and of the engines to be ready, kernels proved and graphs captured."""
    rollout_s: int = Field(600, ge=1)
    """For the responses of one step."""
    train_s: int = Field(600, ge=1)
    """For scoring, and again for the update, of one step."""
    sync_s: int = Field(120, ge=1)
    """For the weights of one step to reach the engines, and for each question to a rank."""
    collective_s: int = Field(120, ge=1)
    """For one exchange between ranks: a rank that does not come is named."""
    stop_s: int = Field(30, ge=1)
    """For a process to leave before it is killed."""


class Profile(BaseModel):
    """One machine, model and data set. Paths are absolute once loaded; in a file they are relative to it."""

    model_config = _STRICT

    format: Literal["rlk.profile/1"] = "rlk.profile/1"
    """Version of this form."""
    origin: str = ""
    """Embedded name or file that it was read from; set by the loader, refused in a file."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the machine and model, which the manifest repeats."""
    device: Literal["cpu", "cuda"]
    """Where the ranks compute; cuda takes Hopper GPUs only."""
    ranks: Literal[1, 2, 4, 8] = 8
    """Processes of the trainer, TP x CP; the engines divide as many among themselves."""
    collectives: Literal["host", "cuda-ipc"] = "host"
    """How ranks exchange bytes: through memory of the host, which a GPU's tensors are copied to and from, or from GPU
    to GPU through CUDA IPC."""
    gpus: Literal[1, 2, 4, 8] | None = None
    """GPUs of one host that the ranks are spread over; null: all that are visible, as far as they divide the ranks."""
    model: str
    """Folder of a Qwen3 checkpoint: config.json, tokenizer.json, safetensors."""
    weights_seed: int | None = None
    """Seed from which the model's weights are drawn at first use, where the folder holds a config.json and no weights;
    for profiles of tests, whose model need not know anything."""
    reference: str | None = None
    """Checkpoint of the KL reference; the model itself if null."""
    prompts: str
    """JSONL with `prompt` and `label`."""
    reward: Literal["answer", "parity"] = "answer"
    """What earns a reward of 1: the label as the answer; or, for a test model whose weights are random and which knows
    no answer, a response whose token ids have an even sum, so that rewards differ and advantages are not zero."""
    max_prompt_len: int = Field(ge=1)
    """Tokens of the longest prompt; a longer one stops the run instead of being cut."""
    prompts_per_step: int = Field(ge=1)
    """Prompts of one training step."""
    samples_per_prompt: int = Field(ge=1)
    """Responses to each prompt, whose mean reward is the baseline; a greedy run takes one."""
    engine: EngineLimits
    """What one vLLM engine may take, below."""
    defaults: dict[str, Any] = {}
    """Option values by field name, weaker than the command line and the environment."""
    timeouts: Timeouts = Timeouts()
    """Limits of waits, below."""
    test: bool = False
    """Whether faults may be injected on purpose, and a checkout with uncommitted changes may run."""
    python: str | None = None
    """Interpreter that runs the driver and its actors; this one if null."""
    framework: str | None = None
    """Checkout of this project that they import; the installed one if null."""

    @model_validator(mode="after")
    def _ranks_spread_evenly(self) -> Self:
        if self.collectives != "host" and self.device == "cpu":
            raise ValueError(f"collectives {self.collectives}: device cpu allows host")
        if self.gpus is not None and self.device == "cpu":
            raise ValueError(f"gpus {self.gpus}: device cpu takes none: leave it out")
        if self.gpus is not None and self.ranks % self.gpus:
            raise ValueError(f"gpus {self.gpus}: allowed is a number that divides the {self.ranks} ranks")
        return self

    @model_validator(mode="after")
    def _meaningless_only_in_tests(self) -> Self:
        if self.test:
            return self
        if self.reward != "answer":
            raise ValueError(f"reward {self.reward}: allowed is answer: the others are for profiles with test true")
        if self.weights_seed is not None:
            raise ValueError(f"weights_seed {self.weights_seed}: random weights are for profiles with test true")
        return self

    def limited(self, engine: Mapping[str, int]) -> Profile:
        """This profile with other limits of its engines, by field; raises ConfigErrors for a wrong one."""
        try:
            limits = EngineLimits.model_validate({**self.engine.model_dump(), **engine})
        except ValidationError as error:
            raise ConfigErrors(_lines(error, f"{self.name}, engine")) from error
        return self.model_copy(update={"engine": limits})

    def gpus_of(self, there: int) -> int:
        """How many of `there` GPUs the ranks are spread over; more than `there` where the profile asks for more."""
        return self.gpus or max((n for n in DEGREES if n <= there and self.ranks % n == 0), default=1)


def load_profile(name: str | None, cwd: Path) -> Profile:
    """The profile called or stored at `name`; without one, cwd's .rlk-profile.json, else the embedded `tiny-cpu`.

    Raises ConfigErrors with every fault of the file and every path in it that leads nowhere.
    """
    if name is None:
        local = cwd / PROFILE_FILE
        name = str(local) if local.exists() else DEFAULT_PROFILE
    embedded = _EMBEDDED / f"{name}.json"
    if os.sep not in name and embedded.exists():
        return _load(embedded, origin=name, base=_REPOSITORY)
    path = (cwd / name).resolve()
    return _load(path, origin=str(path), base=path.parent)


def _load(path: Path, origin: str, base: Path) -> Profile:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        known = ", ".join(sorted(p.stem for p in _EMBEDDED.glob("*.json")))
        message = f"--profile {shown(origin)}: {reason}: allowed is a profile file, or an embedded name: {known}"
        raise ConfigErrors([message]) from error
    if isinstance(content, dict) and "origin" in content:
        raise ConfigErrors([f"profile {origin}: origin: is set by the loader: remove it"])
    try:
        profile = Profile.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ConfigErrors(_lines(error, origin)) from error
    profile = profile.model_copy(update={"origin": origin, **_absolute(profile, base)})
    errors = list(_missing(profile))
    if errors:
        raise ConfigErrors(errors)
    return profile


def _lines(error: ValidationError, origin: str) -> list[str]:
    lines = []
    for fault in error.errors(include_url=False):
        place = ".".join(str(part) for part in fault["loc"])
        value = "" if isinstance(fault["input"], dict) else f" {shown(fault['input'])}"
        lines.append(f"profile {origin}: {place}{value}: {fault['msg']}")
    return lines


def _absolute(profile: Profile, base: Path) -> dict[str, str]:
    paths = {name: getattr(profile, name) for name in ("model", "reference", "prompts", "python", "framework")}
    # normpath, not resolve: a virtual environment's python is a link, and followed it would lose its packages.
    return {name: os.path.normpath(base / path) for name, path in paths.items() if path is not None}


def _missing(profile: Profile) -> list[str]:
    wanted = {
        "model": Path(profile.model).is_dir(),
        "prompts": Path(profile.prompts).is_file(),
        "reference": profile.reference is None or Path(profile.reference).is_dir(),
        "python": profile.python is None or os.access(profile.python, os.X_OK),
        "framework": profile.framework is None or Path(profile.framework).is_dir(),
    }
    return [
        f"profile {profile.origin}: {name} {shown(getattr(profile, name))}: nothing usable there: correct the path"
        for name, there in wanted.items()
        if not there
    ]
