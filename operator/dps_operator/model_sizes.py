"""The sizes of a DPSRouter's models, from which the memory of its engines is computed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from pydantic import ValidationError

from dps_engines.models import MODELS, ModelFacts
from dps_operator.api.spec import Spec
from dps_operator.api.status import ModelSize

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
"""An id on the Hugging Face Hub, unlike a path or a URL."""


@dataclass(frozen=True)
class HubModel:
    """A model on the Hugging Face Hub. revision: branch, tag or commit; None for its default branch."""

    name: str
    revision: str | None = None


@dataclass(frozen=True)
class ModelSizes:
    """What is known of the sizes of a DPSRouter's models.

    read: the sizes of models that were read from their configurations. unreadable: by the name of a model, why its
    configuration cannot be used.
    """

    read: Mapping[HubModel, ModelFacts] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def known(self) -> Mapping[str, ModelFacts]:
        """The sizes of all known models, by name. Sizes that were read take precedence."""
        return {**MODELS, **{model.name: facts for model, facts in self.read.items()}}

    def reason(self, name: str) -> str:
        """The name of an unknown model, with the reason in parentheses if there is one."""
        return f"{name} ({self.unreadable[name]})" if name in self.unreadable else name

    def to_status(self) -> list[dict[str, Any]]:
        """`status.models`."""
        return [
            ModelSize(
                name=model.name,
                revision=model.revision,
                parameters=facts.parameters,
                layers=facts.layers,
                heads=facts.heads,
                kv_heads=facts.kv_heads,
                intermediate_size=facts.intermediate_size,
                head_size=facts.head_size,
            ).model_dump(by_alias=True, exclude_none=True)
            for model, facts in self.read.items()
        ]


def models_to_read(spec: Spec) -> Sequence[HubModel]:
    """The models whose configurations have to be read, because their sizes are not known otherwise."""
    speculation = spec.pools.speculative.speculation
    found = []
    if spec.model.source is None:
        found.append(HubModel(spec.model.name, spec.model.revision))
    if speculation.draft_model is not None and speculation.draft_source is None:
        found.append(HubModel(speculation.draft_model))
    return [model for model in found if model.name not in MODELS and _HUB_ID.fullmatch(model.name)]


def recorded_sizes(status: Mapping[str, Any]) -> dict[HubModel, ModelFacts]:
    """The sizes in `status.models`, which make the result independent of restarts and of the Hub's availability."""
    try:
        sizes = [ModelSize.model_validate(item) for item in status.get("models", [])]
    except ValidationError:
        return {}
    return {
        HubModel(size.name, size.revision): ModelFacts(
            size.parameters, size.layers, size.heads, size.kv_heads, size.intermediate_size, size.head_size
        )
        for size in sizes
    }
