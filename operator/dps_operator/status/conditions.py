"""All conditions of a DPSRouter, from its spec and its observed children."""

from collections.abc import Sequence

from dps_engines.pools import PoolName
from dps_operator.builders.launch import memory_assumption
from dps_operator.errors import SpecError
from dps_operator.resources import Router
from dps_operator.scale_to_zero.rules import serving
from dps_operator.status.components import component_conditions
from dps_operator.status.condition import Condition
from dps_operator.status.features import (
    autoscaling,
    demand_measured,
    monitored,
    route_accepted,
    routing_calibrated,
)
from dps_operator.status.observed import Observed
from dps_operator.status.prefix_cache import prefix_cache_conditions
from dps_operator.status.progress import failed_rollouts, progressing


def conditions(router: Router, observed: Observed) -> list[Condition]:
    """All conditions of a DPSRouter with a parsable spec; Ready first."""
    valid = spec_valid(observed.invalid, observed.rejected, "" if observed.invalid else _assumption(router))
    components = component_conditions(router, observed)
    idle = {f"{pool.capitalize()}PoolReady" for pool in observed.scaled_to_zero}
    required = [valid, *(component for component in components if component.type not in idle)]
    features = [
        *autoscaling(router, observed),
        *route_accepted(router, observed),
        *monitored(router, observed),
        *prefix_cache_conditions(router, observed),
        *demand_measured(router, observed),
        *routing_calibrated(router, observed),
    ]
    warnings = [feature.message for feature in features if feature.status == "False"]
    if failed := failed_rollouts(router, observed):
        warnings.insert(0, failed)
    return [
        _ready(required, observed.scaled_to_zero, warnings),
        progressing(router, observed),
        valid,
        *components,
        *features,
    ]


def _assumption(router: Router) -> str:
    """What is assumed about the GPU memory; empty if nothing is, or if the spec has not been checked yet."""
    try:
        return memory_assumption(router)
    except SpecError:
        return ""


def spec_valid(invalid: str, rejected: str = "", assumption: str = "") -> Condition:
    """Whether the spec can be applied.

    invalid: why it cannot be applied; empty if it can. rejected: why some of the objects cannot be applied; empty if
    all can. assumption: on which this depends.
    """
    if invalid:
        message = f"{invalid}; running workloads are not changed"
        return Condition("SpecValid", "False", "InvalidSpec", message)
    if rejected:
        message = f"{rejected}; the other objects of the DPSRouter are applied"
        return Condition("SpecValid", "False", "InvalidSpec", message)
    return Condition(
        "SpecValid", "True", "Accepted", "; ".join(filter(None, ["the spec is valid", assumption]))
    )


def _ready(
    required: Sequence[Condition], scaled_to_zero: Sequence[PoolName], warnings: Sequence[str]
) -> Condition:
    """Whether requests are served. warnings: problems that do not prevent this."""
    for condition in required:
        if condition.status != "True":
            return Condition("Ready", "False", condition.reason, condition.message)
    return Condition("Ready", "True", "Serving", "; ".join([serving(scaled_to_zero), *warnings]))
