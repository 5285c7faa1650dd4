"""The two pools of engines: `spec.pools`."""

from pydantic import ConfigDict, Field

from dps_engines.launch import (
    DEFAULT_NGRAM_TOKENS,
    DEFAULT_STEPS,
    DEFAULT_TOP_K,
    DRAFT_TOKENS_LIMITS,
    STEPS_LIMITS,
    TOP_K_LIMITS,
    Algorithm,
)
from dps_operator.api.types import APIObject, EnvVar, PodTemplate, Resources, rules

REPLICAS_OR_AUTOSCALING = (
    "!(has(self.replicas) && has(self.autoscaling))",
    "set either replicas or autoscaling, not both",
)
MIN_UP_TO_MAX = (
    "self.minReplicas <= self.maxReplicas",
    "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
)


class PoolAutoscaling(APIObject):
    """A HorizontalPodAutoscaler over the gateway's `dps_in_flight` metric, which an adapter must serve."""

    model_config = ConfigDict(json_schema_extra=rules(MIN_UP_TO_MAX))

    min_replicas: int = Field(default=1, ge=1, le=1000, description="Fewest replicas.")
    max_replicas: int = Field(ge=1, le=1000, description="Most replicas.")
    target_in_flight_per_replica: int = Field(
        default=16, ge=1, le=100000, description="Requests in flight that one replica should carry."
    )


_STEPS = f"(has(self.steps) ? self.steps : {DEFAULT_STEPS})"
_TOP_K = f"(has(self.topK) ? self.topK : {DEFAULT_TOP_K})"


class Speculation(APIObject):
    """How the speculative pool drafts."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.algorithm == 'Ngram' || has(self.draftModel)",
                "speculation.draftModel is needed by Standalone, Eagle and Eagle3; set it, or choose Ngram",
            ),
            (
                "self.algorithm != 'Ngram' || !has(self.draftModel)",
                "Ngram drafts from the text itself; remove speculation.draftModel",
            ),
            (
                "self.algorithm != 'Ngram' || (!has(self.steps) && !has(self.topK))",
                "Ngram has no draft steps and no top-k; remove speculation.steps and speculation.topK",
            ),
            (
                f"self.algorithm == 'Ngram' || !has(self.draftTokens) || {_TOP_K} != 1 ||"
                f" self.draftTokens == {_STEPS} + 1",
                "with topK 1 speculation.draftTokens must be steps + 1; change it, or leave it out",
            ),
            (
                f"self.algorithm == 'Ngram' || !has(self.draftTokens) || {_TOP_K} == 1 ||"
                f" self.draftTokens <= 1 + {_TOP_K} + ({_STEPS} - 1) * {_TOP_K} * {_TOP_K}",
                "the draft tree has at most 1 + topK + (steps - 1) * topK^2 tokens; lower"
                " speculation.draftTokens",
            ),
        )
    )

    algorithm: Algorithm = Field(
        description=(
            "Standalone: a smaller model drafts. Eagle, Eagle3: a draft head trained for the model. "
            "Ngram: drafts from the text itself, without a draft model."
        )
    )
    draft_model: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Draft model, as in model.name. Needed by every algorithm but Ngram.",
    )
    steps: int | None = Field(
        default=None,
        ge=STEPS_LIMITS[0],
        le=STEPS_LIMITS[1],
        description=f"Draft steps of one round; {DEFAULT_STEPS} when left out.",
    )
    top_k: int | None = Field(
        default=None,
        ge=TOP_K_LIMITS[0],
        le=TOP_K_LIMITS[1],
        description=f"Branches of the draft tree at each step; {DEFAULT_TOP_K} (a chain) when left out.",
    )
    draft_tokens: int | None = Field(
        default=None,
        ge=DRAFT_TOKENS_LIMITS[0],
        le=DRAFT_TOKENS_LIMITS[1],
        description=(
            "Tokens verified in one round; steps * topK + 1 when left out, "
            f"{DEFAULT_NGRAM_TOKENS} with Ngram."
        ),
    )


class PoolSpec(APIObject):
    """One pool of engines."""

    model_config = ConfigDict(json_schema_extra=rules(REPLICAS_OR_AUTOSCALING))

    replicas: int | None = Field(
        default=None, ge=1, le=1000, description="Replicas; 1 when neither this nor autoscaling is set."
    )
    autoscaling: PoolAutoscaling | None = Field(
        default=None, description="Replicas by load. Needs an adapter that serves the gateway's metrics."
    )
    args: list[str] = Field(
        default=[], max_length=128, description="Arguments added to the engine in this pool."
    )
    env: list[EnvVar] = Field(default=[], max_length=128, description="Environment added in this pool.")
    resources: Resources = Field(
        default=Resources(),
        description="Resources of the engine container; GPUs follow engine.tensorParallel.",
    )
    pod_template: PodTemplate = Field(default=PodTemplate(), description="Laid over the pods of this pool.")


class SpeculativePoolSpec(PoolSpec):
    """The pool that decodes speculatively."""

    speculation: Speculation = Field(description="How it drafts.")


class Pools(APIObject):
    """The two pools that turns are routed to."""

    speculative: SpeculativePoolSpec = Field(description="The pool that decodes speculatively.")
    greedy: PoolSpec = Field(default=PoolSpec(), description="The pool that decodes one token at a time.")
