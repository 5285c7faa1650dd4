"""Whether an engine's models fit into its GPUs. Sizes are those of one GPU, in bytes."""

from typing import Final

from dps_engines.launch import Launch
from dps_engines.models import ModelFacts

GIB: Final = 2**30

MIN_TOKENS: Final = 16_384
"""The tokens of the smallest useful KV cache, which holds the prompts of a few sessions."""


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


def fit_warning(launch: Launch) -> str:
    """Why the known models and their smallest KV caches do not fit into a GPU; empty if they do, or if it is not known.

    Engines need memory for activations as well, so models that fit according to this sum may still be too large.
    """
    if launch.gpu_bytes is None:
        return ""
    caches = MIN_TOKENS * sum(
        model.kv_per_token(launch.tensor_parallel) for model in known_models(launch).values()
    )
    parts = weights(launch) | {f"KV caches of {MIN_TOKENS} tokens": caches}
    if sum(parts.values()) <= launch.gpu_bytes:
        return ""
    total = " + ".join(f"{gib(size)} ({name})" for name, size in parts.items())
    return (
        f"{total} = {gib(sum(parts.values()))} per GPU do not fit into {gib(launch.gpu_bytes)}, with 16-bit weights "
        f"and tensorParallel {launch.tensor_parallel}; increase tensorParallel, use smaller models, or set "
        "--quantization in args"
    )


def gib(size: float) -> str:
    """A size for messages."""
    return f"{size / GIB:.1f} GiB"
