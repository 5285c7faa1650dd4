"""`spec.pools`: the two pools of engines."""

from typing import Literal

from pydantic import ConfigDict, Field

from dps_engines.launch import (
    DEFAULT_NGRAM_TOKENS,
    DEFAULT_STEPS,
    DEFAULT_TOP_K,
    DRAFT_TOKENS_LIMITS,
    STEPS_LIMITS,
    TOP_K_LIMITS,
    WITHOUT_DRAFT_MODEL,
    Algorithm,
)
from dps_operator.api.model import VERSION_PATTERN, Runtime
from dps_operator.api.sources import ModelSource
from dps_operator.api.types import APIObject, EnvVar, IntOrPercent, PodTemplate, Resources, rules

REPLICAS_OR_AUTOSCALING = (
    "!(has(self.replicas) && has(self.autoscaling))",
    "set either replicas or autoscaling, not both",
)
MIN_UP_TO_MAX = (
    "self.minReplicas <= self.maxReplicas",
    "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
)


EXTERNAL_WITHOUT_REPLICAS = (
    "!has(self.scaling) || self.scaling != 'External' || (!has(self.replicas) && !has(self.autoscaling))",
    "replicas and autoscaling must not be set with scaling External, which leaves the number of replicas to others",
)
_ZERO = "['0', '0%']"


class PoolStrategy(APIObject):
    """How a changed pod template is rolled out within one pool."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.type) || self.type != 'Recreate' || (!has(self.maxSurge) && !has(self.maxUnavailable))",
                "strategy.maxSurge and strategy.maxUnavailable must not be set with type Recreate",
            ),
            (
                f"!(has(self.maxSurge) && string(self.maxSurge) in {_ZERO} &&"
                f" (!has(self.maxUnavailable) || string(self.maxUnavailable) in {_ZERO}))",
                "strategy.maxUnavailable must be greater than 0 if strategy.maxSurge is 0",
            ),
        )
    )

    type: Literal["RollingUpdate", "Recreate"] = Field(
        default="RollingUpdate",
        description="RollingUpdate: a few pods are replaced at a time. Recreate: all pods of the pool are "
        "deleted before new ones are created, which needs no spare GPU.",
    )
    max_surge: IntOrPercent | None = Field(
        default=None,
        description="Maximum number or percentage of pods above the number of replicas during a rollout; 1 if unset. "
        "Each needs free GPUs.",
    )
    max_unavailable: IntOrPercent | None = Field(
        default=None,
        description="Maximum number or percentage of replicas that may be unavailable during a rollout; 0 if unset.",
    )


class PoolAutoscaling(APIObject):
    """A HorizontalPodAutoscaler driven by the gateway's `dps_demand` metric, which requires a metrics adapter."""

    model_config = ConfigDict(json_schema_extra=rules(MIN_UP_TO_MAX))

    min_replicas: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Minimum number of replicas. With 0 the operator stops all engines of the pool when it has had no "
        "requests for idleSeconds, and starts one when requests arrive for it.",
    )
    max_replicas: int = Field(ge=1, le=1000, description="Maximum number of replicas.")
    idle_seconds: int = Field(
        default=900,
        ge=10,
        le=86_400,
        description="Time in seconds without a request after which a pool with minReplicas 0 is scaled to zero.",
    )
    target_in_flight_per_replica: int = Field(
        default=16,
        ge=1,
        le=100000,
        description="Target number of requests per replica, in flight or waiting in the gateways.",
    )


_STEPS = f"(has(self.steps) ? self.steps : {DEFAULT_STEPS})"
_TOP_K = f"(has(self.topK) ? self.topK : {DEFAULT_TOP_K})"
_WITHOUT_DRAFT_MODEL = f"(self.algorithm in {list(WITHOUT_DRAFT_MODEL)})"


class Speculation(APIObject):
    """Speculative decoding."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"{_WITHOUT_DRAFT_MODEL} || has(self.draftModel)",
                "Standalone, Eagle and Eagle3 require speculation.draftModel; set it, or choose Ngram or Suffix",
            ),
            (
                f"!{_WITHOUT_DRAFT_MODEL} || !has(self.draftModel)",
                "speculation.draftModel must not be set with algorithms Ngram and Suffix, which use no draft model",
            ),
            (
                f"!{_WITHOUT_DRAFT_MODEL} || !has(self.draftSource)",
                "speculation.draftSource must not be set with algorithms Ngram and Suffix, which use no draft model",
            ),
            (
                f"!{_WITHOUT_DRAFT_MODEL} || (!has(self.steps) && !has(self.topK))",
                "speculation.steps and speculation.topK must not be set with algorithms Ngram and Suffix, which do not"
                " use them",
            ),
            (
                f"{_WITHOUT_DRAFT_MODEL} || !has(self.draftTokens) || {_TOP_K} != 1 ||"
                f" self.draftTokens == {_STEPS} + 1",
                "speculation.draftTokens must be steps + 1 if topK is 1; change or remove speculation.draftTokens",
            ),
            (
                f"{_WITHOUT_DRAFT_MODEL} || !has(self.draftTokens) || {_TOP_K} == 1 ||"
                f" self.draftTokens <= 1 + {_TOP_K} + ({_STEPS} - 1) * {_TOP_K} * {_TOP_K}",
                "speculation.draftTokens must not exceed the size of the draft tree,"
                " 1 + topK + (steps - 1) * topK^2",
            ),
        )
    )

    algorithm: Algorithm = Field(
        description=(
            "Standalone: a smaller draft model. Eagle, Eagle3: a draft head trained for the model. "
            "Ngram: n-grams of the prompt, without a draft model. Suffix: the most frequent continuations in the "
            "prompt and in earlier answers, without a draft model; only for VLLM, with an image that contains the "
            "Python package arctic-inference."
        )
    )
    draft_model: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Draft model: a model id or a path, as in model.name. Required by Standalone, Eagle "
        "and Eagle3.",
    )
    draft_source: ModelSource | None = Field(
        default=None,
        description="Where the draft model's files are, as model.source; draftModel is then only its name.",
    )
    steps: int | None = Field(
        default=None,
        ge=STEPS_LIMITS[0],
        le=STEPS_LIMITS[1],
        description=f"Draft steps per verification step; {DEFAULT_STEPS} if unset.",
    )
    top_k: int | None = Field(
        default=None,
        ge=TOP_K_LIMITS[0],
        le=TOP_K_LIMITS[1],
        description=f"Branches of the draft tree per step; {DEFAULT_TOP_K} (a chain) if unset. vLLM supports only 1.",
    )
    draft_tokens: int | None = Field(
        default=None,
        ge=DRAFT_TOKENS_LIMITS[0],
        le=DRAFT_TOKENS_LIMITS[1],
        description=(
            f"Tokens verified per verification step; if unset, steps * topK + 1, {DEFAULT_NGRAM_TOKENS} for Ngram, or "
            "the engine's default for Suffix."
        ),
    )


class PoolSpec(APIObject):
    """One pool of engines."""

    model_config = ConfigDict(json_schema_extra=rules(REPLICAS_OR_AUTOSCALING, EXTERNAL_WITHOUT_REPLICAS))

    replicas: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Number of replicas; 1 if neither replicas nor autoscaling is set.",
    )
    scaling: Literal["Managed", "External"] = Field(
        default="Managed",
        description="Managed: replicas or autoscaling determine the number of replicas. External: the operator does not"
        " set it, so that kubectl scale, KEDA or your own HorizontalPodAutoscaler can scale the pool's Deployment.",
    )
    autoscaling: PoolAutoscaling | None = Field(
        default=None,
        description="Scale replicas by the number of requests in flight or waiting. Requires an adapter that serves "
        "the gateway's metrics through the custom metrics API of Kubernetes.",
    )
    strategy: PoolStrategy = Field(
        default=PoolStrategy(), description="How a changed pod template is rolled out within the pool."
    )
    runtime: Runtime | None = Field(
        default=None, description="Inference engine of this pool; engine.runtime if unset."
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image of this pool's engines, as in engine.image. If runtime, image or version is set "
        "for the pool, engine.image and engine.version do not apply to it.",
    )
    version: str | None = Field(
        default=None,
        pattern=VERSION_PATTERN,
        max_length=64,
        description="Version of this pool's engines, as in engine.version.",
    )
    args: list[str] = Field(
        default=[], max_length=128, description="Additional engine arguments for this pool."
    )
    env: list[EnvVar] = Field(
        default=[], max_length=128, description="Additional environment variables for this pool."
    )
    resources: Resources = Field(
        default=Resources(),
        description="Resources of the engine container. engine.tensorParallel sets the number of GPUs, and a limit "
        "of GPUs must be equal to it, or 0 without GPUs. By default 4 CPUs and 32Gi of memory are requested "
        "per GPU, and memory for copies of KV with prefixCache. Without model.cache, the models are "
        "downloaded to the node's disk: request and limit it with ephemeral-storage. Without this limit, the "
        "directory is limited to twice the 16-bit weights and 32Gi, if the sizes of all models are known.",
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(), description="Pod template to merge into the generated one of this pool."
    )


class SpeculativePoolSpec(PoolSpec):
    """The pool with speculative decoding."""

    speculation: Speculation = Field(description="Speculative decoding.")


class Pools(APIObject):
    """The two pools of engines."""

    speculative: SpeculativePoolSpec = Field(description="The pool with speculative decoding.")
    greedy: PoolSpec = Field(default=PoolSpec(), description="The pool without speculative decoding.")
