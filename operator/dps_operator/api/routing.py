"""`spec.routing`: the policy that assigns each turn to a pool."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject, rules

Policy = Literal["DeltaPrefill", "TotalLength", "AlwaysSpeculative", "AlwaysGreedy", "Random"]

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
                "a credential is shared by many sessions and cannot identify one; remove it from sessionKeys",
            )
        )
    )

    policy: Policy = Field(
        default="DeltaPrefill",
        description=(
            "DeltaPrefill: speculative if the prompt grew by at most thresholdTokens. TotalLength: speculative if it "
            "has at most thresholdTokens tokens. AlwaysSpeculative, AlwaysGreedy, Random: for comparison."
        ),
    )
    threshold_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=128,
        description=(
            "Threshold in tokens. 0 routes every turn to the greedy pool, null every turn to the speculative pool. "
            "Set null by server-side apply, because kubectl apply drops nulls, or use policy AlwaysSpeculative."
        ),
    )
    session_ttl_seconds: int = Field(
        default=3600,
        ge=1,
        le=2_592_000,
        alias="sessionTTLSeconds",
        description="Seconds after its last turn that a session expires.",
    )
    session_keys: list[SessionKey] = Field(
        default=[],
        max_length=32,
        description=(
            "Sources of a request's session id in order of precedence, as `header:NAME` or `body:FIELD`; the "
            "gateway's default list if empty."
        ),
    )
