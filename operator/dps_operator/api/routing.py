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
    """Which turn goes to which pool. A change reaches running gateways without a restart."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.sessionKeys) || self.sessionKeys.all(key, !(key.lowerAscii() in"
                " ['header:authorization', 'header:proxy-authorization', 'header:cookie',"
                " 'header:x-api-key']))",
                "many sessions share a credential, which cannot identify one; take it off sessionKeys",
            )
        )
    )

    policy: Policy = Field(
        default="DeltaPrefill",
        description=(
            "DeltaPrefill: speculative when the prompt grew by at most thresholdTokens. TotalLength: when it "
            "is at most that long. AlwaysSpeculative, AlwaysGreedy, Random: for comparison."
        ),
    )
    threshold_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=128,
        description=(
            "The threshold in tokens. 0 is all greedy; null has no bound and is all speculative: set it by "
            "server-side apply, as plain kubectl apply drops nulls, or choose policy AlwaysSpeculative."
        ),
    )
    session_ttl_seconds: int = Field(
        default=3600,
        ge=1,
        le=2_592_000,
        alias="sessionTTLSeconds",
        description="Seconds after its last turn that a session is forgotten.",
    )
    session_keys: list[SessionKey] = Field(
        default=[],
        max_length=32,
        description=(
            "Where a request's session id is looked for, in order, as `header:NAME` or `body:FIELD`; the "
            "gateway's own list when empty."
        ),
    )
