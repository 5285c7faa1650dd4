"""Whether an engine's models can be split across its GPUs and fit into them. Sizes are those of one GPU, in bytes."""

from collections.abc import Mapping
from typing import Final

from dps_engines.launch import TENSOR_PARALLEL_LIMITS, EngineError, Launch
from dps_engines.models import ModelFacts

GIB: Final = 2**30


def known_models(launch: Launch) -> dict[str, ModelFacts]:
    """The model and the draft model, by name; a model that is not known is left out."""
    found = {}
    if launch.model in launch.models:
        found[launch.model] = launch.models[launch.model]
    draft = launch.speculation.draft_model if launch.speculation else None
    if draft is not None and draft in launch.models:
        found[f"draft {draft}"] = launch.models[draft]
    return found


def weights(launch: Launch) -> dict[str, int]:
    """The weights of the known models, by name."""
    return {name: model.weights(launch.tensor_parallel) for name, model in known_models(launch).items()}


def check_split(launch: Launch) -> None:
    """Raises EngineError if a model cannot be divided equally among the GPUs. The draft has the target's GPUs."""
    models, gpus = known_models(launch), launch.tensor_parallel
    for name, model in models.items():
        if not model.splits_heads(gpus):
            part = f"the {model.heads} attention heads and {model.kv_heads} KV heads of {name}"
        elif not model.splits(gpus):
            part = f"the MLP of {name}, whose size is {model.intermediate_size},"
        else:
            continue
        possible = [
            str(number)
            for number in range(TENSOR_PARALLEL_LIMITS[0], TENSOR_PARALLEL_LIMITS[1] + 1)
            if all(one.splits(number) for one in models.values())
        ]
        raise EngineError(
            f"spec.engine.tensorParallel: {part} cannot be divided among {gpus} GPUs; choose one of "
            f"{', '.join(possible)}"
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def too_large(launch: Launch, parts: Mapping[str, int], gpu_bytes: int, remedy: str) -> EngineError:
    """The error for parts that do not fit together. remedy: what else the user can do, for this engine."""
    total = " + ".join(f"{_gib(size)} ({name})" for name, size in parts.items())
    return EngineError(
        f"spec.engine.tensorParallel: {total} = {_gib(sum(parts.values()))} per GPU do not fit into "
        f"{_gib(gpu_bytes)}, with 16-bit weights and tensorParallel {launch.tensor_parallel}; increase "
        f"tensorParallel, use a smaller model, or {remedy}"
    )


def check_weights(launch: Launch, gpu_bytes: int, remedy: str) -> None:
    """Raises EngineError if the weights alone do not fit. remedy: see `too_large`."""
    parts = weights(launch)
    if sum(parts.values()) >= gpu_bytes:
        raise too_large(launch, parts, gpu_bytes, remedy)
