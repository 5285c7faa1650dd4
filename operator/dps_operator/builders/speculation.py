"""Speculative decoding of an engine process, as described by the spec."""

from dps_engines import launch
from dps_operator.api.pools import Speculation
from dps_operator.builders.sources import model_path
from dps_operator.resources import MODELS


def launch_speculation(speculation: Speculation) -> launch.Speculation:
    """The settings of the engine's command line. Raises EngineError if a value is outside its limits."""
    fields = speculation.model_dump(exclude={"draft_source"})
    path = model_path(speculation.draft_source, "draft", MODELS)
    return launch.Speculation(**fields, draft_path=path)
