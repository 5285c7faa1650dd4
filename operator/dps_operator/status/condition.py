"""One condition of a DPSRouter."""

from dataclasses import dataclass

from dps_operator.api.status import ConditionType


@dataclass(frozen=True)
class Condition:
    """A condition without a transition time."""

    type: ConditionType
    status: str
    reason: str
    message: str
