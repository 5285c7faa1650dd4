"""The engine-independent description of one engine process, from which a runtime derives its command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dps_engines.models import MODELS, ModelFacts

Algorithm = Literal["Standalone", "Eagle", "Eagle3", "Ngram", "Suffix"]
WITHOUT_DRAFT_MODEL: tuple[Algorithm, ...] = ("Ngram", "Suffix")
"""Algorithms without a draft model, which draft from the prompt or from earlier answers."""

DEFAULT_STEPS = 3
DEFAULT_TOP_K = 1
DEFAULT_NGRAM_TOKENS = 12

TENSOR_PARALLEL_LIMITS = (1, 16)
"""Smallest and largest number of GPUs of an engine."""

STEPS_LIMITS = (1, 32)
TOP_K_LIMITS = (1, 16)
DRAFT_TOKENS_LIMITS = (2, 256)
"""Smallest and largest value of each setting of speculative decoding."""

ANY_ADDRESS = "0.0.0.0"

OTHER_GPUS = "an engine has the GPUs of spec.engine.tensorParallel, which are on one node"
"""The reason for refusing flags that make an engine use more GPUs or nodes."""


class EngineError(ValueError):
    """An engine cannot be started as described; the message says what to change."""


def _check(field: str, value: int | None, limits: tuple[int, int]) -> None:
    if value is not None and not limits[0] <= value <= limits[1]:
        raise EngineError(
            f"spec.pools.speculative.speculation.{field}: {value} is not between {limits[0]} and {limits[1]}"
        )


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding; the fields are those of `spec.pools.speculative.speculation`.

    steps: draft steps per verification step. top_k: branches of the draft tree per draft step. draft_tokens: tokens
    verified per verification step. None selects the default. draft_path: folder of the draft model; None if it is on
    the Hub or draft_model is a path. Raises EngineError if a value is outside its limits.
    """

    algorithm: Algorithm
    draft_model: str | None = None
    steps: int | None = None
    top_k: int | None = None
    draft_tokens: int | None = None
    draft_path: str | None = None

    def __post_init__(self) -> None:
        _check("steps", self.steps, STEPS_LIMITS)
        _check("topK", self.top_k, TOP_K_LIMITS)
        _check("draftTokens", self.draft_tokens, DRAFT_TOKENS_LIMITS)

    def required_draft_model(self) -> str:
        """The draft model's path or id. Raises EngineError if there is none."""
        if self.draft_model is None:
            raise EngineError(
                f"spec.pools.speculative.speculation.draftModel: {self.algorithm} needs it; set it, or choose Ngram"
            )
        return self.draft_path or self.draft_model


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. name: the part after the colon of `MODEL:ADAPTER`, with which requests select it. path: an id on
    the Hub, or a path."""

    name: str
    path: str


@dataclass(frozen=True)
class Traces:
    """Where an engine exports its spans: the base URL of an OTLP receiver, and the protocol."""

    endpoint: str
    protocol: Literal["grpc", "http/protobuf"] = "grpc"


@dataclass(frozen=True)
class MooncakeCache:
    """A prefix cache in the host memory of the engines of both pools, which Mooncake combines into one store.

    master: address of the Mooncake master, as host:port. segment_bytes: host memory that each engine contributes.
    owner: identifies the deployment; deployments with the same master share no pages. version: of the engine.
    weights: the source of the model's files if it is not the Hub. arguments: the user's; those that determine the bytes
    of a page are equal in both pools. devices: RDMA devices; empty for all that Mooncake finds.
    """

    master: str
    segment_bytes: int
    owner: str
    version: str
    weights: str = ""
    arguments: tuple[str, ...] = ()
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unshareable:
    """Why two pools cannot share a prefix cache: a CamelCase reason, and a message that says what to change."""

    reason: str
    message: str


@dataclass(frozen=True)
class Launch:
    """One engine process.

    model: id of the model, or its path. model_path: its folder, if model is only the name of the model.
    tokenizer: None for the model's. revision: branch, tag or commit of the model; None for its default branch.
    tensor_parallel: GPUs over which the model is split. speculation: None for greedy decoding. prefix_cache: None if
    the engine shares no pages. gpu_bytes: memory of each GPU; None if it is unknown. shares_gpu_with: the other engine
    on the same GPU; None if the engine has its GPUs for itself. memory_limit: bytes of that GPU to which MPS limits the
    engine; None if both can allocate all of it. adapters: LoRA adapters that are loaded at the start. models: the sizes
    of the models that are known, by their ids. Nothing is assumed about other models.
    """

    model: str
    served_name: str
    port: int
    host: str = ANY_ADDRESS
    tensor_parallel: int = 1
    speculation: Speculation | None = None
    traces: Traces | None = None
    prefix_cache: MooncakeCache | None = None
    tokenizer: str | None = None
    revision: str | None = None
    gpu_bytes: int | None = None
    shares_gpu_with: "Launch | None" = None
    memory_limit: int | None = None
    model_path: str | None = None
    adapters: tuple[Adapter, ...] = ()
    models: Mapping[str, ModelFacts] = field(default_factory=lambda: MODELS)

    @property
    def location(self) -> str:
        """The path or the id from which the engine loads the model."""
        return self.model_path or self.model
