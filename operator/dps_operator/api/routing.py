"""`spec.routing`: the policy that assigns each turn to a pool."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from dps_operator.api.calibration import Calibration
from dps_operator.api.types import APIObject, rules

Policy = Literal[
    "DeltaPrefill", "TotalLength", "AlwaysSpeculative", "AlwaysGreedy", "Random", "Sticky", "Adaptive"
]

SessionKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=r"^(header:[A-Za-z0-9_-]+|body:[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)$",
    ),
]


class Routing(APIObject):
    """The routing policy. Running gateways apply changes without a restart."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.sessionKeys) || self.sessionKeys.all(key, !(key.lowerAscii() in"
                " ['header:authorization', 'header:proxy-authorization', 'header:cookie',"
                " 'header:x-api-key']))",
                "sessionKeys must not contain headers with credentials, because many sessions share a credential",
            )
        )
    )

    policy: Policy = Field(
        default="DeltaPrefill",
        description=(
            "DeltaPrefill: speculative if the prompt grew by at most thresholdTokens. TotalLength: speculative if it "
            "has at most thresholdTokens tokens. AlwaysSpeculative, AlwaysGreedy: every turn goes to that pool. "
            "Random: each turn goes to a random pool. Sticky: a session stays in the pool that was less loaded when it "
            "began. Adaptive: each turn goes to the pool whose predicted cost is lower."
        ),
    )
    threshold_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=128,
        description=(
            "Threshold in tokens. With 0 every turn goes to the greedy pool, with null to the speculative pool. "
            "Client-side kubectl apply removes null, so that the default applies: use kubectl apply --server-side, or "
            "policy AlwaysSpeculative."
        ),
    )
    session_ttl_seconds: int = Field(
        default=3600,
        ge=1,
        le=2_592_000,
        alias="sessionTTLSeconds",
        description="Time in seconds after which a session expires if it has no further turn.",
    )
    session_keys: list[SessionKey] = Field(
        default=[],
        max_length=32,
        description=(
            "Sources of a request's session id in order of precedence, as `header:NAME` or `body:FIELD`; the "
            "gateway's default list if empty."
        ),
    )
    calibration: Calibration | None = Field(
        default=None,
        description="If set, a CronJob calibrates the routing by simulating the sessions of the gateways' decision "
        "logs, and status.routing.recommended has the result.",
    )
