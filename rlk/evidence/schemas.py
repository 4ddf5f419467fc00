"""Every JSON file of a run directory as a model: one class a file, versioned by its `SCHEMA`.

The array files are in `arrays.py`, the text files in `ray_status.py` and `seal.py`. Fields, units and the checks
that read them: docs/evidence.md.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from rlk.evidence.documents import Count, Document, Number, Part

Mode = Literal["consistency", "native"]
Command = Literal["verify", "run"]
Status = Literal["running", "complete", "failed"]
Kind = Literal["embedding", "norm", "qk_norm", "attention", "mlp", "head"]
Source = Literal["command line", "cell", "environment", "profile", "default"]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}:[0-9a-f]{16}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

# The manifest repeats these rules, so that a reader need not know which version of the program held them.
KL_CONVENTION = (
    "The KL reference is temperature-scaled over the full real vocabulary and never truncated by top-p or top-k; "
    "the policy keeps its sampling support; the term is k3 in float64."
)
GREEDY_CONVENTION = (
    "Temperature 0 picks the lowest id among the maxima; top-p and top-k are ignored on both sides; the recorded "
    "log-probability is the untempered one over the real vocabulary."
)


class Requested(Part):
    """One setting as it was given, and by whom."""

    value: JsonValue
    source: Source


class TopologyRecord(Part):
    """Degrees and derived counts. ranks = train_tp * train_cp; an engine has rollout_tp * rollout_cp ranks."""

    train_tp: Count
    train_cp: Count
    rollout_tp: Count
    rollout_cp: Count
    ranks: Count
    engines: Count
    engine_ranks: Count
    engine_cap: str | None


class Derived(Part):
    """The other derived values of the plan. Budgets are tokens, graph sizes are batch sizes."""

    token_budget: Count
    logical_budget: Count
    graph_sizes: tuple[Count, ...]
    padded_vocab: Count
    prompts_per_step: Count
    samples_per_prompt: Count
    baseline: Literal["group", "batch"]
    offload: bool
    max_model_len: Count


class Kernel(Part):
    """One kernel choice: which form runs, and the sentence that says how it was proved before the first step."""

    name: Annotated[str, Field(min_length=1)]
    form: Annotated[str, Field(min_length=1)]
    proof: Annotated[str, Field(min_length=1)]


class Repository(Part):
    """The code that ran. `patch_sha256` hashes the uncommitted difference when `dirty`."""

    revision: str | None
    dirty: bool
    patch_sha256: Sha256 | None


class Memory(Part):
    """Memory decisions: is the training state moved away while engines generate, and why."""

    offload: bool
    reason: str


class Process(Part):
    """A process that the run started. `started` is its start time, seconds since the epoch."""

    pid: Annotated[int, Field(gt=0)]
    started: Number
    role: str


class Holding(Part):
    """One kind of a train rank's state: its bytes, and where it lies while engines generate.

    resident: on the rank's device. offloaded: on the host, and moved back before training. released: it exists only
    while it is used.
    """

    name: Literal["weights", "reference", "masters", "first moments", "second moments", "gradients", "arenas"]
    bytes: Count
    during_rollout: Literal["resident", "offloaded", "released"]


class TrainReadback(Part):
    """Effective settings, as one train rank reports them after the last step."""

    pid: Annotated[int, Field(gt=0)]
    rank: Count
    tp_rank: Count
    cp_rank: Count
    tp: Count
    cp: Count
    mode: Mode
    dtype: str
    master_dtype: str
    token_budget: Count
    padded_vocab: Count
    device: str
    gpu: str | None
    """Name and UUID of the GPU; ranks with the same one share it."""
    transport: str
    offload: bool
    holdings: tuple[Holding, ...]
    freed_bytes: Count
    """Bytes of the device's memory that the last offload gave back."""
    model_class: str
    kernels: dict[str, str]


class Partitioned(Part):
    """Prefill steps of one engine rank over the whole run: how many had their query rows shared out over
    context-parallel ranks, the rows of those steps, and which of them this rank computed (rlk.evidence.partition)."""

    steps: Count
    rows: Count
    own_rows: Count
    own_key: Count


class EngineReadback(Part):
    """Effective settings, as one rank of one engine reports them after the last step.

    `default_sampling` is what a request that says nothing would get; top_k is -1 where it is off.
    """

    pid: Annotated[int, Field(gt=0)]
    engine: Count
    rank: Count
    tp: Count
    cp: Count
    decode_cp: Count
    world_size: Count
    device: str
    gpu: str | None
    transport: str
    mode: Mode
    dtype: str
    max_model_len: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    block_size: Count
    kv_cache_bytes: Count
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    graph_sizes: tuple[Count, ...]
    kv_bytes_per_token: Count
    partitioned: Partitioned
    generation_config: str
    default_sampling: dict[str, Number]
    model_class: str
    attention_class: str
    sampler_class: str
    kernels: dict[str, str]


class Readback(Part):
    """`train` by rank; `engines` by engine, then rank."""

    train: tuple[TrainReadback, ...]
    engines: tuple[tuple[EngineReadback, ...], ...]


class Manifest(Document):
    """manifest.json: what was asked, what ran, with which code, and how it ended."""

    SCHEMA: ClassVar[str] = "rlk.manifest/3"

    run_id: str
    command: Command
    arguments: tuple[str, ...]
    mode: Mode
    created: str
    status: Status
    error: str | None
    requested: dict[str, Requested]
    effective: dict[str, JsonValue]
    topology: TopologyRecord
    derived: Derived
    profile: str
    kernels: tuple[Kernel, ...]
    versions: dict[str, str]
    repository: Repository
    runtime: dict[str, str]
    memory: Memory
    kl_convention: str
    greedy_convention: str
    readback: Readback
    processes: tuple[Process, ...]
    actors_outlive_run: bool
    notes: tuple[str, ...]


class Generated(Part):
    """Counted inside one engine, from the start to the end of one step's rollout."""

    samples: Count
    tokens: Count
    chunks: Count
    cached_tokens: Count
    preemptions: Count
    graph_replays: Count = 0
    """Model executions that ran a captured CUDA graph."""


class Seconds(Part):
    """Wall time of the phases of one step."""

    rollout: Number
    score: Number
    train: Number
    sync: Number
    total: Number


class Metrics(Document):
    """One line of metrics.jsonl. `generated` and `engine_ranks_agree` have one entry an engine, in order."""

    SCHEMA: ClassVar[str] = "rlk.metrics/1"

    step: Count
    loss: Number
    policy_loss: Number
    kl: Number
    grad_norm: Number
    lr: Number
    reward_mean: Number
    reward_std: Number
    advantage_abs_max: Number
    nonzero_advantages: Count
    truncated_share: Number
    response_tokens: Count
    samples: Count
    clip_fraction: Number
    clip_factor: Number
    weight_version: Count
    rollout_logprobs_reused: bool
    generated: tuple[Generated, ...]
    engine_ranks_agree: tuple[bool, ...]
    seconds: Seconds


class TensorEntry(Part):
    """One exported tensor: Hugging Face name, full shape, dtype as torch spells it, kind."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    kind: Kind


class Fingerprints(Document):
    """fingerprints/vNNNN.json: one weight version, as the trainer exported it and as every engine holds it."""

    SCHEMA: ClassVar[str] = "rlk.fingerprint/1"

    version: Count
    tensors: tuple[TensorEntry, ...]
    trainer: dict[str, Hash]
    trainer_replicas_agree: bool
    engines: tuple[dict[str, Hash], ...]


class Update(Document):
    """update.json of a step: fingerprints of what the optimizer read and wrote, by stored parameter (qkv of a layer is
    one), over all atoms, whoever holds them. `replicas_agree`: all ranks that hold the same atom have the same sums."""

    SCHEMA: ClassVar[str] = "rlk.update/1"

    step: Count
    gradients: dict[str, Hash]
    masters: dict[str, Hash]
    first_moments: dict[str, Hash]
    second_moments: dict[str, Hash]
    replicas_agree: bool


class TrajectoryLine(Document):
    """One line of trajectory.jsonl: what one step did, as hashes; `digest` also covers every step before it."""

    SCHEMA: ClassVar[str] = "rlk.trajectory/2"

    step: Count
    tokens: Sha256
    logprobs: Sha256
    rewards: Sha256
    advantages: Sha256
    gradients: Sha256
    masters: Sha256
    moments: Sha256
    random: Sha256
    weights: Sha256
    digest: Sha256
