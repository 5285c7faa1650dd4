"""The DPSRouter API: `spec` and `status`. The CRD and its reference are generated from these models."""

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict, JsonValue

from dps_engines.launch import (
    DEFAULT_NGRAM_TOKENS,
    DEFAULT_STEPS,
    DEFAULT_TOP_K,
    DRAFT_TOKENS_LIMITS,
    STEPS_LIMITS,
    TENSOR_PARALLEL_LIMITS,
    TOP_K_LIMITS,
    WITHOUT_DRAFT_MODEL,
    Algorithm,
)
from dps_engines.pools import PoolName
from dps_engines.sglang.runtime import DEFAULT_VERSION as SGLANG_VERSION
from dps_engines.sglang.runtime import REPOSITORY as SGLANG_REPOSITORY
from dps_engines.vllm.runtime import DEFAULT_VERSION as VLLM_VERSION
from dps_engines.vllm.runtime import REPOSITORY as VLLM_REPOSITORY
from dps_operator.errors import SpecError

GROUP = "dpsrouter.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DPSRouter"
PLURAL = "dpsrouters"

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""The lists of generated pods that merge by a key, and their keys, as in a strategic merge patch. Other lists are
replaced."""


def _object(parent: dict[str, Any], field: str) -> dict[str, Any]:
    """A member of an object; empty if it is unset or null. Raises ValueError if it is not an object."""
    value = parent.get(field)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{field} must be an object")
    return value or {}


def _objects(parent: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """A member of an object; empty if it is unset or null. Raises ValueError if it is not a list of objects."""
    value = parent.get(field)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise ValueError(f"{field} must be a list of objects")
    return value or []


def _check_merged_lists(parent: dict[str, Any]) -> None:
    """Raises ValueError if a list of a pod or container cannot be merged by its key."""
    for field, key in MERGE_KEYS.items():
        for item in _objects(parent, field):
            if isinstance(item.get(key), dict | list):
                raise ValueError(f"{key} must be a single value in the items of {field}")


def checked_pod_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The pod spec. Raises ValueError if it cannot be merged into a generated one."""
    _check_merged_lists(spec)
    for container in (*_objects(spec, "containers"), *_objects(spec, "initContainers")):
        _check_merged_lists(container)
        _object(_object(container, "resources"), "limits")
        _object(container, "startupProbe")
    return spec


def checked_affinity(affinity: dict[str, Any]) -> dict[str, Any]:
    """The affinity. Raises ValueError if it cannot be combined with a generated one."""
    required = _object(_object(affinity, "nodeAffinity"), "requiredDuringSchedulingIgnoredDuringExecution")
    for term in _objects(required, "nodeSelectorTerms"):
        _objects(term, "matchExpressions")
        _objects(term, "matchFields")
    _objects(_object(affinity, "podAffinity"), "preferredDuringSchedulingIgnoredDuringExecution")
    return affinity


def without_nulls(value: Any) -> Any:
    """The value without the members of objects that are null, which Kubernetes does not distinguish from unset ones."""
    if isinstance(value, dict):
        return {field: without_nulls(member) for field, member in value.items() if member is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"

Quantity = Annotated[
    str,
    BeforeValidator(str),
    Field(pattern=QUANTITY),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A Kubernetes quantity: a whole number, or a string such as `500m` or `16Gi`."""

INT_OR_PERCENT = r"^[0-9]+%$"


def _int_or_percent(value: Any) -> int | str:
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(INT_OR_PERCENT, value):
        return value
    raise ValueError("must be a whole number, or a percentage such as 25%")


IntOrPercent = Annotated[
    int | str,
    PlainValidator(_int_or_percent),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": INT_OR_PERCENT,
            "minimum": 0,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A number of pods, or a percentage of the replicas such as `25%`."""

FreeObject = dict[str, Any]
"""A Kubernetes object that is copied into a child unchecked; the API server validates it when the child is applied."""

Name = Annotated[str, Field(min_length=1, max_length=253)]
"""The name of an object in the DPSRouter's namespace."""


def validations(*pairs: tuple[str, str]) -> JsonDict:
    """CEL rules, which are pairs of an expression and a message, as part of a schema."""
    found: list[JsonValue] = [{"rule": rule, "message": message} for rule, message in pairs]
    return {"x-kubernetes-validations": found}


def _unchanged(field: str) -> str:
    """The CEL expression that an optional field has its previous value."""
    return f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"


def rules(*pairs: tuple[str, str]) -> ConfigDict:
    """The `model_config` of an API object with CEL rules, see `validations`."""
    return ConfigDict(json_schema_extra=validations(*pairs))


class APIObject(BaseModel):
    """Base of the API objects: camelCase names, unknown fields rejected, immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class SecretKeyRef(APIObject):
    """One key of a Secret in the DPSRouter's namespace."""

    name: Name
    """Name of the Secret."""
    key: str = Field(min_length=1, max_length=253)
    """Key in the Secret."""


class EnvVar(APIObject):
    """An environment variable, as in a container."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the variable."""
    value: str | None = None
    """Value of the variable."""
    value_from: FreeObject | None = None
    """Source of the value, as in a container: secretKeyRef, fieldRef, …"""


class Toleration(APIObject):
    """A toleration, as in a pod."""

    key: str | None = None
    """Key of the taint; all keys if unset."""
    operator: Literal["Exists", "Equal"] | None = None
    """How the value is compared; Equal if unset."""
    value: str | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; all effects if unset."""
    toleration_seconds: int | None = None
    """Seconds that a NoExecute taint is tolerated; unlimited if unset."""


class Resources(APIObject):
    """Resource requests and limits, as in a container. Unset entries keep the operator's defaults."""

    requests: dict[str, Quantity] | None = None
    """Minimum amounts that the scheduler reserves."""
    limits: dict[str, Quantity] | None = None
    """Maximum amounts that the container may use."""


class TemplateMetadata(APIObject):
    """Labels and annotations added to pods."""

    labels: dict[str, str] | None = None
    """Labels added to the pods."""
    annotations: dict[str, str] | None = None
    """Annotations added to the pods."""


class PodTemplate(APIObject):
    """A pod template to merge into the generated one. Named items are merged by name."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations added to the pods."""
    spec: Annotated[FreeObject, AfterValidator(checked_pod_spec)] | None = None
    """A pod spec. Containers, volumes, environment variables and image pull secrets are merged by name, volume mounts
    by path, ports by number, and topology spread constraints by topologyKey; other lists, such as tolerations,
    replace the generated ones. A volume's source, a variable's value and a probe's handler replace one of another
    kind."""


def to_wire(model: APIObject) -> dict[str, Any]:
    """The object as in a manifest: camelCase names, unset fields omitted."""
    return model.model_dump(by_alias=True, exclude_none=True)


_UNITS = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000**power) for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    **{unit: Decimal(1024**power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}


def quantity_value(quantity: str) -> Decimal:
    """The value of a Kubernetes quantity, for example in bytes or CPU cores."""
    number = quantity.rstrip("EGKMPTikm")
    return Decimal(number) * _UNITS[quantity[len(number) :]]


def quantity_bytes(quantity: str) -> int:
    """A Kubernetes quantity in bytes, rounded down."""
    return int(quantity_value(quantity))


_RELATIVE = r"^[^/]"
"""The path does not begin with a slash."""
_NO_PARENT = (
    "!has(self.path) || !self.path.split('/').exists(part, part == '..')",
    "source.path must not contain '..'",
)


class ClaimSource(APIObject):
    """A folder of a PersistentVolumeClaim, which is mounted read-only."""

    model_config = rules(_NO_PARENT)

    claim_name: Name
    """Name of the claim. Pods on several nodes require the access mode ReadOnlyMany or ReadWriteMany."""
    path: str | None = Field(default=None, pattern=_RELATIVE, max_length=1024)
    """Folder of the model in the volume; its root if unset."""


class ImageSource(APIObject):
    """An OCI image or artifact, which is mounted read-only as an image volume."""

    model_config = rules(_NO_PARENT)

    image: str = Field(min_length=1, max_length=512)
    """Reference of the image or artifact. Image volumes are enabled by default from Kubernetes 1.35 on, and with the
    feature gate ImageVolume from 1.31 on. The container runtime must support them too."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled, as in a container."""
    path: str | None = Field(default=None, pattern=_RELATIVE, max_length=1024)
    """Folder of the model in the image; its root if unset."""


_SERVICE_ACCOUNT = (
    "ServiceAccount of the engine pods, to which the cloud grants access by workload identity. The gateway keeps its "
    "own ServiceAccount, <name>-gateway, which needs the same access unless model.tokenizer is set."
)
_ONE_IDENTITY = (
    "!(has(self.credentialsSecretRef) && has(self.serviceAccountName))",
    "set either source.credentialsSecretRef or source.serviceAccountName, not both",
)

_NO_PARENT_IN_URI = ("!self.uri.split('/').exists(part, part == '..')", "source.uri must not contain '..'")


class CredentialsSecret(APIObject):
    """A Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""

    name: Name
    """Name of the Secret."""


class S3Source(APIObject):
    """A folder of a bucket with the API of Amazon S3, which an init container downloads."""

    model_config = rules(_ONE_IDENTITY, _NO_PARENT_IN_URI)

    uri: str = Field(pattern=r"^s3://[a-zA-Z0-9][a-zA-Z0-9._-]+(/[^/]+)*/?$", max_length=1024)
    """The folder, as s3://BUCKET/PATH."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/]", max_length=512)
    """URL of the service, for storage other than Amazon S3."""
    region: str | None = Field(default=None, min_length=1, max_length=64)
    """Region of the bucket, such as eu-central-1."""
    credentials_secret_ref: CredentialsSecret | None = None
    """Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""
    service_account_name: Name | None = Field(default=None, description=_SERVICE_ACCOUNT)


class GSSource(APIObject):
    """A folder of a Google Cloud Storage bucket, which an init container downloads."""

    model_config = rules(_ONE_IDENTITY, _NO_PARENT_IN_URI)

    uri: str = Field(pattern=r"^gs://[a-zA-Z0-9][a-zA-Z0-9._-]+(/[^/]+)*/?$", max_length=1024)
    """The folder, as gs://BUCKET/PATH."""
    credentials_secret_ref: SecretKeyRef | None = None
    """Secret key with the JSON key of a Google service account."""
    service_account_name: Name | None = Field(default=None, description=_SERVICE_ACCOUNT)


class ModelSource(APIObject):
    """Where the files of a model are, if not on the Hugging Face Hub."""

    model_config = rules(
        (
            "[has(self.pvc), has(self.s3), has(self.gs), has(self.oci)].exists_one(one, one)",
            "set exactly one of source.pvc, source.s3, source.gs and source.oci",
        )
    )

    pvc: ClaimSource | None = None
    """A folder of an existing volume."""
    s3: S3Source | None = None
    """A folder of an S3 bucket. It is downloaded to the volume of model.cache or, without one, to the node's disk at
    each start of a pod."""
    gs: GSSource | None = None
    """A folder of a Google Cloud Storage bucket. It is downloaded as with s3."""
    oci: ImageSource | None = None
    """An OCI image or artifact."""


class SharedClaim(APIObject):
    """A ReadWriteMany volume that the operator creates."""

    model_config = rules(
        (
            _unchanged("storageClassName"),
            "claim.storageClassName cannot be changed; remove the claim, or create a new DPSRouter",
        ),
        (
            "!quantity(string(self.size)).isLessThan(quantity(string(oldSelf.size)))",
            "claim.size cannot be decreased",
        ),
    )

    size: Quantity
    """Size of the volume."""
    storage_class_name: Name | None = None
    """Storage class, which must support ReadWriteMany; the cluster's default if unset. Immutable."""


class EmptyDirectory(APIObject):
    """A directory of the node's disk that is deleted with the pod."""

    size_limit: Quantity | None = None
    """Maximum size; unlimited if unset."""


class EngineCache(APIObject):
    """A volume for what engines compile, so that they do not compile it at every start."""

    model_config = rules(
        (
            "[has(self.hostPath), has(self.existingClaim), has(self.claim), has(self.emptyDir)]"
            ".exists_one(one, one)",
            "set exactly one of cache.hostPath, cache.existingClaim, cache.claim and cache.emptyDir",
        )
    )

    host_path: str | None = Field(default=None, pattern=r"^/[^:]+$", max_length=4096)
    """Directory of the node, created if it does not exist. Only engines on the same node share it, unless it is on a
    network file system."""
    existing_claim: Name | None = None
    """An existing PersistentVolumeClaim. Engines on different nodes require the access mode ReadWriteMany."""
    claim: SharedClaim | None = None
    """A ReadWriteMany volume that the operator creates."""
    empty_dir: EmptyDirectory | None = None
    """A directory of each pod, which only outlives a restart of its containers."""


class Calibration(APIObject):
    """The schedule and the objective of calibrations. The gateways keep a decision log, which contains no prompts."""

    schedule: str = Field(default="0 3 * * *", min_length=1, max_length=100)
    """When a calibration starts, as in a CronJob, in UTC."""
    objective: Literal["session", "session-p95", "batch", "ttft", "ttft-p95", "tpot"] = "session"
    """What to minimise: the median session latency (session), the time for all sessions (batch), the median time to
    first token (ttft), the median time per output token (tpot), or a 95th percentile."""
    hardware: Literal["a100-7b", "h100-7b", "h200-7b", "a100-70b", "h100-70b", "h200-70b"] = "a100-7b"
    """The GPU and the size of the model that the simulation assumes; choose the most similar one."""
    apply: bool = False
    """Whether the gateways use the recommended policy and threshold instead of those in spec.routing."""


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

    model_config = rules(
        (
            "!has(self.sessionKeys) || self.sessionKeys.all(key, !(key.lowerAscii() in"
            " ['header:authorization', 'header:proxy-authorization', 'header:cookie',"
            " 'header:x-api-key']))",
            "sessionKeys must not contain headers with credentials, because many sessions share a credential",
        )
    )

    policy: Policy = "DeltaPrefill"
    """DeltaPrefill: speculative if the prompt grew by at most thresholdTokens. TotalLength: speculative if it has at
    most thresholdTokens tokens. AlwaysSpeculative, AlwaysGreedy: every turn goes to that pool. Random: each turn
    goes to a random pool. Sticky: a session stays in the pool that was less loaded when it began. Adaptive: each
    turn goes to the pool whose predicted cost is lower."""
    threshold_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 128
    """Threshold in tokens. With 0 every turn goes to the greedy pool, with null to the speculative pool. Client-side
    kubectl apply removes null, so that the default applies: use kubectl apply --server-side, or policy
    AlwaysSpeculative."""
    min_acceptance: Annotated[float, Field(ge=1, le=100)] | None = None
    """For DeltaPrefill: a session goes to the speculative pool only if its verifications are expected to yield at least
    this many tokens, or if too little is known about it."""
    session_ttl_seconds: int = Field(default=3600, ge=1, le=2_592_000, alias="sessionTTLSeconds")
    """Time in seconds after which a session expires if it has no further turn."""
    session_keys: list[SessionKey] = Field(default=[], max_length=32)
    """Sources of a request's session id in order of precedence, as `header:NAME` or `body:FIELD`; the gateway's default
    list if empty."""
    calibration: Calibration | None = None
    """If set, a CronJob calibrates the routing by simulating the sessions of the gateways' decision logs, and
    status.routing.recommended has the result."""


Runtime = Literal["SGLang", "VLLM"]
VERSION_PATTERN = r"^[0-9]+\.[0-9]+\.[0-9]+([.-]?(post|rc|dev)[0-9]+)?$"


class ModelCache(APIObject):
    """A volume for downloaded models, so that an engine does not download its model at every start."""

    model_config = rules(
        (
            "has(self.size) != has(self.existingClaim)",
            "set either cache.size, for a volume that the operator creates, or cache.existingClaim, not both",
        ),
        (
            "has(self.size) || !has(self.storageClassName)",
            "cache.storageClassName requires cache.size; an existing claim already has a storage class",
        ),
        (
            f"!has(self.size) || !has(oldSelf.size) || ({_unchanged('storageClassName')})",
            "cache.storageClassName cannot be changed; remove the cache, or create a new DPSRouter",
        ),
        (
            "!has(self.size) || !has(oldSelf.size) || self.accessMode == oldSelf.accessMode",
            "cache.accessMode cannot be changed; remove the cache, or create a new DPSRouter",
        ),
        (
            "!has(self.size) || !has(oldSelf.size) ||"
            " !quantity(string(self.size)).isLessThan(quantity(string(oldSelf.size)))",
            "cache.size cannot be decreased",
        ),
    )

    size: Quantity | None = None
    """Size of the volume that the operator creates, for example 100Gi."""
    storage_class_name: Name | None = None
    """Storage class of that volume; the cluster's default if unset. Immutable."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteMany: one volume shared by all engine pods (Filestore, EFS, Azure Files). ReadWriteOnce: a separate disk
    for each engine pod, deleted with the pod."""
    existing_claim: Name | None = None
    """An existing PersistentVolumeClaim, mounted at /models in every engine pod."""


class Adapter(APIObject):
    """A LoRA adapter of the model."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)
    """Requests with the model <servedName>:<name> use the adapter."""
    path: str = Field(pattern=r"^[^=,\s]+$", max_length=512)
    """A model id on the Hugging Face Hub, or a path in the engine's container, for example under /models."""


class ServedModel(APIObject):
    """The target model, served by both pools."""

    model_config = rules(
        (
            "!has(self.adapters) || self.adapters.all(adapter,"
            " self.adapters.exists_one(other, other.name == adapter.name))",
            "model.adapters must have different names",
        ),
        (
            "!has(self.source) || !has(self.revision)",
            "model.revision must not be set with model.source, because it applies to models on the Hub",
        ),
    )

    name: str = Field(min_length=1, max_length=512)
    """Model id on the Hugging Face Hub, for example Qwen/Qwen2.5-7B-Instruct, or a path under /models, where the cache
    volume is mounted. With model.source, only a name."""
    served_name: str | None = Field(default=None, min_length=1, max_length=512)
    """Name that clients send as `model`; model.name if unset."""
    revision: str | None = Field(default=None, min_length=1, max_length=128)
    """Branch, tag or commit of the model on the Hub; its default branch if unset."""
    tokenizer: str | None = Field(default=None, min_length=1, max_length=512)
    """Tokenizer of the engines and the gateway: a model id or a path, as in model.name; the model's if unset. Required
    if model.name is a URL, such as s3://…."""
    source: ModelSource | None = None
    """Where the model's files are; the Hugging Face Hub, or the path in model.name, if unset."""
    adapters: list[Adapter] = Field(default=[], max_length=64)
    """LoRA adapters that the engines of both pools load when they start. SGLang supports them with Ngram and, since
    0.5.23, with Eagle and Eagle3."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret key with a Hugging Face token, for gated and private models."""
    cache: ModelCache | None = None
    """Volume for downloaded models; if unset, each pod downloads the models when it starts."""


class Engine(APIObject):
    """The inference engine of both pools."""

    runtime: Runtime = "SGLang"
    """Inference engine. A pool with a runtime of its own uses that instead."""
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description=(
            f"Container image; if unset, {SGLANG_REPOSITORY}:v<version> for SGLang, and "
            f"{VLLM_REPOSITORY}:v<version> for VLLM."
        ),
    )
    version: str | None = Field(
        default=None,
        pattern=VERSION_PATTERN,
        max_length=64,
        description=(
            "Version of the engine, for which the command line is generated. If unset, it is taken from the image's "
            f"tag; if the tag is not a version, it is {SGLANG_VERSION} for SGLang, and {VLLM_VERSION} for VLLM. If no "
            "image is set either, see upgradePolicy."
        ),
    )
    upgrade_policy: Literal["Manual", "Automatic"] = Field(
        default="Manual",
        description=(
            "Manual: if neither version nor image is set, the engines keep the version with which they were first "
            f"deployed (SGLang {SGLANG_VERSION} or vLLM {VLLM_VERSION} in this release of the operator), and an "
            "upgrade of the operator restarts no engine. Automatic: they get the default version and the pod template "
            "of the operator in use."
        ),
    )
    api_key_secret_ref: SecretKeyRef | None = None
    """Secret key with the API key that the engines of both pools require and that the gateways send; if unset, engines
    accept every client."""
    tensor_parallel: int = Field(default=1, ge=TENSOR_PARALLEL_LIMITS[0], le=TENSOR_PARALLEL_LIMITS[1])
    """GPUs per replica, across which the model is split. The numbers of attention heads of the model and of the draft
    model, and the sizes of their MLPs, must be multiples of it."""
    cache: EngineCache | None = None
    """Volume for kernels and graphs that the engines compile, mounted at /engine-cache; if unset, each pod compiles
    them when it starts."""
    args: list[str] = Field(default=[], max_length=128)
    """Additional engine arguments for both pools. Arguments that the operator sets are rejected."""
    env: list[EnvVar] = Field(default=[], max_length=128)
    """Additional environment variables for both pools."""


class MIG(APIObject):
    """Instances of GPUs that MIG divides."""

    profile: str = Field(pattern=r"^[1-7]g\.[0-9]+gb$", max_length=16)
    """Profile of the GPU instances, for example 3g.40gb, half of an A100 80GB."""
    strategy: Literal["Single", "Mixed"] = "Single"
    """MIG strategy of NVIDIA's device plugin. Single: instances are requested as nvidia.com/gpu, and nodes are selected
    by the labels of GPU Feature Discovery or GKE. Mixed: instances are requested as nvidia.com/mig-<profile>."""


class GPUSharing(APIObject):
    """How NVIDIA's device plugin offers each GPU to two pods."""

    strategy: Literal["TimeSlicing", "MPS"] = "TimeSlicing"
    """TimeSlicing: the engines share the memory, which the operator divides. MPS: the device plugin limits each engine
    to half of the memory and of the compute capacity."""
    renamed: bool = False
    """Whether the device plugin's option renameByDefault is set. The names of the resources then end in .shared, as in
    nvidia.com/gpu.shared."""


class NodePool(APIObject):
    """The nodes for engine pods. Does not apply to gateway and Redis pods."""

    profile: Literal["A100-80GB", "A100-40GB", "None"] = "A100-80GB"
    """Selects nodes with this GPU by the labels of GKE, EKS (node groups, Karpenter, Auto Mode), AKS or NVIDIA GPU
    Feature Discovery, and tolerates the taints nvidia.com/gpu and sku=gpu. With None, nodes are not selected by GPU,
    and these taints are not tolerated."""
    mig: MIG | None = None
    """Each engine gets an instance of a GPU that MIG divides; if unset, GPUs that are not divided."""
    sharing: GPUSharing = GPUSharing()
    """How the GPUs are shared with placement SharedGPU."""
    node_selector: dict[str, str] = {}
    """Labels that nodes must have in addition to those that `profile` requires."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """Tolerations in addition to those of `profile`."""
    affinity: Annotated[FreeObject, BeforeValidator(without_nulls), AfterValidator(checked_affinity)] = {}
    """Affinity in addition to that of `profile`, as in a pod. Both must be satisfied."""


REPLICAS_OR_AUTOSCALING = (
    "!(has(self.replicas) && has(self.autoscaling))",
    "set either replicas or autoscaling, not both",
)
MIN_UP_TO_MAX = (
    "self.minReplicas <= self.maxReplicas",
    "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
)


_ZERO = "['0', '0%']"


class PoolStrategy(APIObject):
    """How a changed pod template is rolled out within one pool."""

    model_config = rules(
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

    type: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    """RollingUpdate: a few pods are replaced at a time. Recreate: all pods of the pool are deleted before new ones are
    created, which needs no spare GPU."""
    max_surge: IntOrPercent | None = None
    """Maximum number or percentage of pods above the number of replicas during a rollout; 1 if unset. Each needs free
    GPUs."""
    max_unavailable: IntOrPercent | None = None
    """Maximum number or percentage of replicas that may be unavailable during a rollout; 0 if unset."""


class PoolAutoscaling(APIObject):
    """A HorizontalPodAutoscaler driven by the gateway's `dps_demand` metric, which requires a metrics adapter."""

    model_config = rules(MIN_UP_TO_MAX)

    min_replicas: int = Field(default=1, ge=0, le=1000)
    """Minimum number of replicas. With 0 the operator stops all engines of the pool when it has had no requests for
    idleSeconds, and starts one when requests arrive for it."""
    max_replicas: int = Field(ge=1, le=1000)
    """Maximum number of replicas."""
    idle_seconds: int = Field(default=900, ge=10, le=86_400)
    """Time in seconds without a request after which a pool with minReplicas 0 is scaled to zero."""
    target_in_flight_per_replica: int = Field(default=16, ge=1, le=100000)
    """Target number of requests per replica, in flight or waiting in the gateways."""


_STEPS = f"(has(self.steps) ? self.steps : {DEFAULT_STEPS})"
_TOP_K = f"(has(self.topK) ? self.topK : {DEFAULT_TOP_K})"
_WITHOUT_DRAFT_MODEL = f"(self.algorithm in {list(WITHOUT_DRAFT_MODEL)})"


class Speculation(APIObject):
    """Speculative decoding."""

    model_config = rules(
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

    algorithm: Algorithm
    """Standalone: a smaller draft model. Eagle, Eagle3: a draft head trained for the model. Ngram: n-grams of the
    prompt, without a draft model. Suffix: the most frequent continuations in the prompt and in earlier answers,
    without a draft model; only for VLLM, with an image that contains the Python package arctic-inference."""
    draft_model: str | None = Field(default=None, min_length=1, max_length=512)
    """Draft model: a model id or a path, as in model.name. Required by Standalone, Eagle and Eagle3."""
    draft_source: ModelSource | None = None
    """Where the draft model's files are, as model.source; draftModel is then only its name."""
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

    model_config = rules(
        REPLICAS_OR_AUTOSCALING,
        (
            "!has(self.scaling) || self.scaling != 'External' || (!has(self.replicas) && !has(self.autoscaling))",
            "replicas and autoscaling must not be set with scaling External, which leaves the number of replicas to"
            " others",
        ),
    )

    replicas: int | None = Field(default=None, ge=1, le=1000)
    """Number of replicas; 1 if neither replicas nor autoscaling is set."""
    scaling: Literal["Managed", "External"] = "Managed"
    """Managed: replicas or autoscaling determine the number of replicas. External: the operator does not set it, so
    that kubectl scale, KEDA or your own HorizontalPodAutoscaler can scale the pool's Deployment."""
    autoscaling: PoolAutoscaling | None = None
    """Scale replicas by the number of requests in flight or waiting. Requires an adapter that serves the gateway's
    metrics through the custom metrics API of Kubernetes."""
    strategy: PoolStrategy = PoolStrategy()
    """How a changed pod template is rolled out within the pool."""
    runtime: Runtime | None = None
    """Inference engine of this pool; engine.runtime if unset."""
    image: str | None = Field(default=None, min_length=1, max_length=512)
    """Container image of this pool's engines, as in engine.image. If runtime, image or version is set for the pool,
    engine.image and engine.version do not apply to it."""
    version: str | None = Field(default=None, pattern=VERSION_PATTERN, max_length=64)
    """Version of this pool's engines, as in engine.version."""
    args: list[str] = Field(default=[], max_length=128)
    """Additional engine arguments for this pool."""
    env: list[EnvVar] = Field(default=[], max_length=128)
    """Additional environment variables for this pool."""
    resources: Resources = Resources()
    """Resources of the engine container. engine.tensorParallel sets the number of GPUs, and a limit of GPUs must be
    equal to it, or 0 without GPUs. By default 4 CPUs and 32Gi of memory are requested per GPU, and memory for copies
    of KV with prefixCache. Without model.cache, the models are downloaded to the node's disk: request and limit it
    with ephemeral-storage. Without this limit, the directory is limited to twice the 16-bit weights and 32Gi, if the
    sizes of all models are known."""
    pod_template: PodTemplate = PodTemplate()
    """Pod template to merge into the generated one of this pool."""


class SpeculativePoolSpec(PoolSpec):
    """The pool with speculative decoding."""

    speculation: Speculation
    """Speculative decoding."""


class Pools(APIObject):
    """The two pools of engines."""

    speculative: SpeculativePoolSpec
    """The pool with speculative decoding."""
    greedy: PoolSpec = PoolSpec()
    """The pool without speculative decoding."""


DEFAULT_GATEWAY_REPLICAS = 2


class GatewayAutoscaling(APIObject):
    """A HorizontalPodAutoscaler driven by CPU utilization."""

    model_config = rules(MIN_UP_TO_MAX)

    min_replicas: int = Field(default=2, ge=1, le=1000)
    """Minimum number of replicas."""
    max_replicas: int = Field(ge=1, le=1000)
    """Maximum number of replicas."""
    target_cpu_percent: int = Field(default=70, ge=1, le=100, alias="targetCPUPercent")
    """Target CPU utilization, averaged over the replicas, in percent of their CPU request."""


AddressRange = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=64)]


class GatewayService(APIObject):
    """The Service for clients."""

    model_config = rules(
        (
            "self.type == 'LoadBalancer' || (!has(self.loadBalancerClass) && !has(self.loadBalancerSourceRanges))",
            "gateway.service.loadBalancerClass and loadBalancerSourceRanges require the type LoadBalancer",
        ),
        (
            "self.type != 'ClusterIP' || !has(self.externalTrafficPolicy)",
            "gateway.service.externalTrafficPolicy requires the type LoadBalancer or NodePort",
        ),
        (
            f"self.type != 'LoadBalancer' || oldSelf.type != 'LoadBalancer' || {_unchanged('loadBalancerClass')}",
            "gateway.service.loadBalancerClass cannot be changed; set the type to ClusterIP first",
        ),
    )

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the Service."""
    annotations: dict[str, str] = {}
    """Annotations of the Service, for example for a load balancer."""
    load_balancer_class: str | None = Field(default=None, min_length=1, max_length=253)
    """Class of the load balancer, such as service.k8s.aws/nlb; the cluster's default if unset. It cannot be changed
    while the type is LoadBalancer."""
    load_balancer_source_ranges: list[AddressRange] | None = Field(default=None, min_length=1, max_length=256)
    """Ranges of client addresses, such as 203.0.113.0/24, from which the load balancer accepts connections, if the
    cloud supports this; from all if unset."""
    external_traffic_policy: Literal["Cluster", "Local"] | None = None
    """Whether nodes forward external connections to the gateways of all nodes (Cluster) or only to their own (Local),
    so that the gateway receives the client's address. Cluster if unset."""


class GatewayLimits(APIObject):
    """`limits` of the gateway's configuration. The gateway's default applies to a field that is unset."""

    max_body_bytes: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Maximum size of a request body in bytes."""
    max_buffered_bytes: int | None = Field(default=None, ge=1, le=2**40)
    """Maximum total size of the bodies of all requests in progress in one gateway pod, in bytes."""
    min_body_bytes_per_second: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Minimum average rate, in bytes per second, at which a request body must arrive after a grace period of 30 s; 0
    for no minimum."""
    max_in_flight_per_replica: int | None = Field(default=None, ge=1, le=100000)
    """Maximum number of requests in flight from one gateway pod to one engine; if the engine reports a lower limit on
    running requests, that limit applies."""
    max_queued: int | None = Field(default=None, ge=0, le=1000000)
    """Maximum number of requests that wait in one gateway pod for a free engine of either pool."""


def _seconds(description: str) -> Any:
    return Field(default=None, gt=0, le=86400, description=f"{description}, in seconds; more than 0.")


class GatewayTimeouts(APIObject):
    """`timeouts` of the gateway's configuration. The gateway's default applies to a field that is unset."""

    body_seconds: float | None = _seconds("Time limit for the arrival of a request's body")
    keep_alive_seconds: float | None = Field(default=None, gt=0, le=3600)
    """Time for which a client's connection is kept open between requests, in seconds; more than 0, and more than the
    load balancer's idle timeout."""
    connect_seconds: float | None = _seconds("Time limit for connecting to an engine")
    first_byte_seconds: float | None = _seconds("Time limit for the first byte of an engine's answer")
    idle_seconds: float | None = _seconds("Time limit between two parts of an engine's answer")
    total_seconds: float | None = _seconds("Time limit for a request")
    heartbeat_seconds: float | None = Field(default=None, ge=0, le=86400)
    """Time in seconds without any byte after which a client that has asked for a stream receives a heartbeat, which
    keeps load balancers from closing the connection; 0 to disable."""
    queue_seconds: float | None = _seconds("Time limit for waiting in the queue, which both pools share")
    wake_seconds: float | None = _seconds(
        "Time limit for waiting while no engine is ready, for example because both pools are scaled to zero; by "
        "default 600 if a pool has autoscaling.minReplicas 0, and otherwise requests are answered with 503 immediately"
    )
    silent_seconds: float | None = _seconds(
        "Time without a token after which an engine's scheduler is checked"
    )
    health_interval_seconds: float | None = _seconds("Time between two health checks of an engine")
    slow_start_seconds: float | None = Field(default=None, ge=0, le=86400)
    """Duration, in seconds, of the slow start in which the share of requests of an engine that joins a pool or returns
    to service grows from a tenth to that of the other engines; 0 to disable."""
    drain_delay_seconds: float | None = Field(default=None, ge=0, le=3600)
    """Time between reporting not-ready and refusing connections when a gateway stops, in seconds."""


class GatewayRetries(APIObject):
    """`retries` of the gateway's configuration."""

    continue_streams: bool = True
    """Whether another engine continues a stream of plain text whose engine has failed; otherwise the stream ends with
    an error event."""


class GatewayAuth(APIObject):
    """Client authentication by API key."""

    secret_name: Name
    """Secret with the gateway's API key file under the key `keys`."""
    isolate_cache: bool = True
    """Whether each tenant has its own prefix cache in the engines. If false, tenants share cached prefixes, and a
    tenant can infer from response times which prompts others have sent."""


class GatewayTLS(APIObject):
    """TLS on the port for clients."""

    secret_name: Name
    """Secret of the type kubernetes.io/tls with the certificate. After a change of the Secret, new connections use the
    new certificate."""


class GatewayIngress(APIObject):
    """An Ingress in front of the gateway."""

    class_name: Name | None = None
    """Ingress class; the cluster's default if unset."""
    host: str = Field(min_length=1, max_length=253)
    """Host name."""
    tls_secret_name: Name | None = None
    """Secret with the TLS certificate of the host; no TLS if unset."""
    annotations: dict[str, str] = {}
    """Annotations of the Ingress, for example the controller's timeouts."""


class ParentRef(APIObject):
    """A Gateway to which the route attaches."""

    name: Name
    """Name of the Gateway."""
    namespace: Name | None = None
    """Namespace of the Gateway; the DPSRouter's if unset."""
    section_name: Name | None = None
    """Listener of the Gateway; all listeners if unset."""


Weight = Annotated[int, Field(ge=0, le=1_000_000)]


class BackendRef(APIObject):
    """A Service that receives a part of the requests."""

    name: Name
    """Name of the Service."""
    namespace: Name | None = None
    """Namespace of the Service; the DPSRouter's if unset. Another one requires a ReferenceGrant in it."""
    port: int = Field(ge=1, le=65535)
    """Port of the Service."""
    weight: Weight = 1
    """Its part of the requests, relative to the sum of all weights."""


class GatewayHTTPRoute(APIObject):
    """A Gateway API HTTPRoute in front of the gateway."""

    parent_refs: list[ParentRef] = Field(min_length=1, max_length=16)
    """Gateways to which the route attaches."""
    hostnames: list[Name] = Field(default=[], max_length=16)
    """Host names; all host names if empty. status.url has the first one, with https if the section name of the first
    parent contains https."""
    request_timeout: str = Field(default="0s", pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")
    """Time limit for a whole request, streamed answers included, for example 10m; 0s for none."""
    filters: list[FreeObject] = Field(default=[], max_length=16)
    """Filters of the route's rule, as in an HTTPRoute: requestHeaderModifier, requestMirror, …"""
    weight: Weight = 1
    """The gateway's part of the requests, relative to the sum of all weights."""
    backend_refs: list[BackendRef] = Field(default=[], max_length=15)
    """Further Services that receive requests, for example the gateway of another DPSRouter."""


def _checked_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error
    return pattern


class Gateway(APIObject):
    """The gateway pods and how clients reach them."""

    model_config = rules(REPLICAS_OR_AUTOSCALING)

    replicas: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description=f"Number of replicas; {DEFAULT_GATEWAY_REPLICAS} if neither replicas nor autoscaling is set.",
    )
    autoscaling: GatewayAutoscaling | None = None
    """Scale replicas by CPU utilization."""
    image: str | None = Field(default=None, min_length=1, max_length=512)
    """Container image; if unset, the operator's default (gatewayImage in the chart's values)."""
    resources: Resources = Resources()
    """Resources of the gateway container."""
    service: GatewayService = GatewayService()
    """The Service for clients."""
    ingress: GatewayIngress | None = None
    """Create an Ingress if set."""
    http_route: GatewayHTTPRoute | None = None
    """Create an HTTPRoute if set. Requires the Gateway API CRDs."""
    model_aliases: list[Annotated[str, Field(min_length=1, max_length=512)]] = Field(
        default=[], max_length=64
    )
    """Other names of the model that clients may send, such as gpt-4o."""
    strict_model: bool = True
    """Whether requests for other models are refused with 404; otherwise the engines decide, and SGLang accepts every
    name."""
    volatile_prompt: (
        list[Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_checked_pattern)]] | None
    ) = Field(default=None, max_length=32)
    """Regular expressions (of Python) whose matches in system prompts are removed, because they change with every
    request. If unset, Claude Code's billing header is removed; an empty list removes nothing."""
    auth: GatewayAuth | None = None
    """Client authentication; if unset, the gateway accepts every client."""
    tls: GatewayTLS | None = None
    """TLS on the port for clients; if unset, the gateway serves HTTP."""
    limits: GatewayLimits = GatewayLimits()
    """Limits on requests and queues."""
    timeouts: GatewayTimeouts = GatewayTimeouts()
    """Time limits for requests."""
    retries: GatewayRetries = GatewayRetries()
    """Answers of engines that fail."""
    drain_seconds: int = Field(default=300, ge=1, le=86400)
    """Time that requests in flight have to finish when a gateway pod is deleted, in seconds."""
    pod_template: PodTemplate = PodTemplate()
    """Pod template to merge into the gateway's generated one."""


class GPUBudget(APIObject):
    """GPUs that both pools share. The operator moves replicas between the pools by their demand."""

    gpus: int = Field(ge=2, le=2000)
    """GPUs of both pools together. Each replica uses engine.tensorParallel of them, and each pool has at least one
    replica."""
    cooldown_seconds: int = Field(default=600, ge=10, le=86_400)
    """Minimum time in seconds between two moves of a replica. The demand is averaged with a half-life of a quarter of
    this time."""


class NetworkPolicy(APIObject):
    """Network policies that allow only the gateway to connect to Redis, and only it and `monitoring` to the engines."""

    clients: list[FreeObject] = Field(default=[], max_length=32)
    """Peers that may reach the gateway, as in a NetworkPolicy's `from`; all peers if empty."""
    monitoring: list[FreeObject] = Field(default=[], max_length=32)
    """Peers that may reach the gateway's admin port and the engines in addition to the gateway, as in a NetworkPolicy's
    `from`. Add Prometheus here."""


class MooncakeMaster(APIObject):
    """A Mooncake master that the operator deploys."""

    image: str | None = Field(default=None, min_length=1, max_length=512)
    """Container image with the command mooncake_master; if unset, the image of the greedy pool's engines."""
    resources: Resources = Resources()
    """Resources of the container."""
    pod_template: PodTemplate = PodTemplate()
    """Pod template to merge into the generated one, for example with pull secrets and a node selector."""


class Mooncake(APIObject):
    """Host memory of the engines, which Mooncake combines into one store."""

    model_config = rules(
        (
            "!(has(self.master) && has(self.externalMaster))",
            "set either mooncake.master or mooncake.externalMaster, not both",
        ),
        (
            "!has(self.devices) || size(self.devices) == 0 || self.protocol == 'RDMA'",
            "mooncake.devices requires protocol RDMA",
        ),
        (
            "quantity(string(self.segmentSize)).isGreaterThan(quantity('0'))",
            "mooncake.segmentSize must be greater than 0",
        ),
    )

    segment_size: Quantity
    """Host memory that each engine contributes, for example 64Gi. It is added to the engine's default memory request,
    and divided between the processes of a tensor-parallel engine."""
    protocol: Literal["TCP", "RDMA"] = "TCP"
    """How engines transfer pages. RDMA adds the capability IPC_LOCK to the engines; request the cluster's RDMA resource
    in the resources of both pools."""
    devices: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=63)]] = Field(
        default=[], max_length=32
    )
    """RDMA devices, for example mlx5_0; all that Mooncake finds if empty."""
    master: MooncakeMaster | None = None
    """The Mooncake master that the operator deploys."""
    external_master: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:[0-9]{1,5}$", max_length=259
    )
    """Address of your own Mooncake master, as host:port. No master is deployed."""


class PrefixCache(APIObject):
    """A prefix cache that the engines of both pools share, for SGLang 0.5.23."""

    model_config = rules(
        ("self.mode == 'Separate' || has(self.mooncake)", "mode Common requires prefixCache.mooncake")
    )

    mode: Literal["Separate", "Common"] = "Separate"
    """Separate: each engine has its own prefix cache. Common: engines also read the KV pages that other engines of the
    DPSRouter have stored; the condition PrefixCacheShared states whether this is possible."""
    mooncake: Mooncake | None = None
    """Settings of Mooncake, which stores the pages. Required by mode Common."""


CA_FILE = "/etc/dps-redis/ca.crt"
"""Where the gateways mount the certificate authorities of an external Redis."""
DEFAULT_SIZE = "1Gi"

SIZE_IS_IMMUTABLE = "sessionStore.managed.size cannot be changed; create a new DPSRouter, or use urlSecretRef"
CLASS_IS_IMMUTABLE = "sessionStore.managed.storageClassName cannot be changed; create a new DPSRouter"


class ManagedStore(APIObject):
    """A Redis server that the operator deploys."""

    model_config = rules(
        ("quantity(string(self.size)).compareTo(quantity(string(oldSelf.size))) == 0", SIZE_IS_IMMUTABLE),
        (_unchanged("storageClassName"), CLASS_IS_IMMUTABLE),
    )

    size: Quantity = DEFAULT_SIZE
    """Size of the volume, of which Redis uses at most half for its data. Immutable."""
    storage_class_name: Name | None = None
    """Storage class of the volume; the cluster's default if unset. Immutable."""
    image: str | None = Field(default=None, min_length=1, max_length=512)
    """Container image of Redis or Valkey; if unset, the operator's default (redisImage in the chart's values)."""
    resources: Resources = Resources()
    """Resources of the container. Redis uses at most three quarters of the memory limit, 512Mi by default, and half of
    the volume for its data. If this is not enough, it removes the sessions that have been idle the longest."""
    pod_template: PodTemplate = PodTemplate()
    """Pod template to merge into the generated one, for example with pull secrets and a node selector."""


_SAME_KIND = (
    "has(self.urlSecretRef) || has(oldSelf.urlSecretRef) || has(self.managed) == has(oldSelf.managed)"
)
_SETTINGS = "(has(self.managed) ? self.managed : oldSelf.managed)"
"""The settings of a managed store that is, or was, described by the defaults alone."""


class SessionStore(APIObject):
    """The Redis that stores session records: a managed one unless urlSecretRef is set."""

    model_config = rules(
        (
            "!(has(self.managed) && has(self.urlSecretRef))",
            "set either sessionStore.managed or sessionStore.urlSecretRef, not both",
        ),
        (
            "!has(self.caSecretRef) || has(self.urlSecretRef)",
            "sessionStore.caSecretRef requires sessionStore.urlSecretRef",
        ),
        (
            f"{_SAME_KIND} || quantity(string({_SETTINGS}.size)).compareTo(quantity('{DEFAULT_SIZE}')) == 0",
            SIZE_IS_IMMUTABLE,
        ),
        (f"{_SAME_KIND} || !has({_SETTINGS}.storageClassName)", CLASS_IS_IMMUTABLE),
    )

    managed: ManagedStore | None = None
    """A Redis server that the operator deploys."""
    url_secret_ref: SecretKeyRef | None = None
    """Secret key with the URL of your own Redis: redis://, rediss://, redis+sentinel:// or redis+cluster://. After a
    change of the Secret, the gateways connect to the new URL."""
    timeout_seconds: float | None = Field(default=None, gt=0, le=60)
    """Time limit of a gateway for a request to Redis, in seconds; more than 0, and 0.25 if unset. Afterwards, the
    gateway uses its copy of the session."""
    mirror_records: int | None = Field(default=None, ge=0, le=100_000_000)
    """Maximum number of records that each gateway process keeps in memory for use while Redis is unavailable; 50,000 if
    unset. A change restarts the gateways."""
    ca_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret key with the certificate authorities of your own Redis. Add "
        f"?ssl_ca_certs={CA_FILE} to the URL.",
    )


class ServiceMonitor(APIObject):
    """A Prometheus operator ServiceMonitor for the gateway, both pools and a managed Mooncake master."""

    interval: str = Field(default="30s", pattern=r"^[0-9]+(ms|s|m)$")
    """Scrape interval."""
    labels: dict[str, str] = {}
    """Labels of the ServiceMonitor, by which Prometheus selects it."""


class Telemetry(APIObject):
    """Traces, metrics and the access log."""

    otlp_endpoint: str | None = Field(default=None, max_length=2048, pattern=r"^https?://[^/]+(/.*)?$")
    """URL of the OTLP receiver for traces of the gateway and the engines; no traces if unset. With protocol
    http/protobuf, the path /v1/traces is appended to it."""
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    """Protocol of the OTLP receiver."""
    sample_ratio: float = Field(default=1, ge=0, le=1)
    """Sampling ratio of the traces that start at the gateway; a request with a trace context keeps its caller's
    decision."""
    trace_url: str | None = Field(default=None, max_length=2048, pattern=r"^https?://.*\{trace\}.*$")
    """URL of a trace in your tracing backend with {trace} in place of the trace id, for links on the gateways' page. A
    change restarts the gateways."""
    access_log: bool = False
    """Whether the gateways write one line of JSON per request, without prompts and keys, to their standard output. A
    change restarts the gateways."""
    service_monitor: ServiceMonitor | None = None
    """Create a ServiceMonitor if set. Requires the Prometheus operator's CRDs."""


def _scaled_by_nothing_else(replicas: str) -> str:
    """The condition that neither pool is scaled, except by the field `replicas` as far as its condition allows it."""
    speculative, greedy = (
        f"{replicas.format(pool)} && !has({pool}.autoscaling)"
        f" && (!has({pool}.scaling) || {pool}.scaling == 'Managed')"
        for pool in ("self.pools.speculative", "self.pools.greedy")
    )
    return f"{speculative} && (!has(self.pools.greedy) || ({greedy}))"


_HAS_MIG = "has(self.nodePool) && has(self.nodePool.mig)"
_HAS_SHARING = "has(self.nodePool) && has(self.nodePool.sharing)"


class Spec(APIObject):
    """Desired state of the DPSRouter."""

    model_config = rules(
        (
            f"!has(self.gpuBudget) || ({_scaled_by_nothing_else('!has({}.replicas)')})",
            "replicas, autoscaling and scaling External must not be set in a pool with gpuBudget, which determines the"
            " number of replicas of both pools",
        ),
        (
            "!has(self.gpuBudget) || self.gpuBudget.gpus >= 2 *"
            " (has(self.engine) && has(self.engine.tensorParallel) ? self.engine.tensorParallel : 1)",
            "gpuBudget.gpus must be at least 2 * engine.tensorParallel, because each pool keeps one replica",
        ),
        (
            "!has(self.placement) || self.placement != 'SharedGPU' || (!has(self.gpuBudget)"
            " && (!has(self.engine) || !has(self.engine.tensorParallel) || self.engine.tensorParallel == 1)"
            f" && {_scaled_by_nothing_else('(!has({0}.replicas) || {0}.replicas == 1)')})",
            "with placement SharedGPU each pool has one replica on one GPU; remove gpuBudget, autoscaling, scaling"
            " External, and replicas and engine.tensorParallel other than 1",
        ),
        (
            f"!({_HAS_SHARING}) || (has(self.placement) && self.placement == 'SharedGPU')"
            " || (self.nodePool.sharing.strategy == 'TimeSlicing' && !self.nodePool.sharing.renamed)",
            "nodePool.sharing requires placement SharedGPU",
        ),
        (
            f"!({_HAS_MIG}) || !({_HAS_SHARING}) || self.nodePool.sharing.strategy != 'MPS'",
            "nodePool.mig cannot be combined with sharing strategy MPS, which NVIDIA's device plugin supports only for"
            " whole GPUs; use TimeSlicing, or remove nodePool.mig",
        ),
        (
            f"!({_HAS_MIG}) || !has(self.engine) || !has(self.engine.tensorParallel)"
            " || self.engine.tensorParallel == 1",
            "an engine cannot use several MIG instances; remove nodePool.mig or engine.tensorParallel",
        ),
    )

    model: ServedModel
    """The target model."""
    engine: Engine = Engine()
    """The inference engine of both pools."""
    node_pool: NodePool = NodePool()
    """Nodes for the engines."""
    placement: Literal["SeparateGPUs", "SharedGPU"] = "SeparateGPUs"
    """SeparateGPUs: each replica has its own GPUs, or its own instance of a GPU with nodePool.mig. SharedGPU: the
    engines of both pools share one GPU, on nodes whose device plugin offers each GPU twice by time-slicing or MPS;
    see nodePool.sharing."""
    pools: Pools
    """The two pools of engines."""
    gpu_budget: GPUBudget | None = None
    """A number of GPUs that both pools share. The operator moves replicas between the pools by their demand; replicas,
    autoscaling and scaling External must not be set in the pools."""
    gateway: Gateway = Gateway()
    """The gateway pods and how clients reach them."""
    routing: Routing = Routing()
    """The routing policy."""
    prefix_cache: PrefixCache | None = None
    """A prefix cache that the engines of both pools share; if unset, each engine has its own."""
    session_store: SessionStore = SessionStore()
    """The Redis that stores session records."""
    telemetry: Telemetry = Telemetry()
    """Traces and metrics."""
    network_policy: NetworkPolicy | None = None
    """If set, network policies are created. With {}, only the gateway can connect to the engines and Redis."""
    suspend: bool = False
    """Stop all engines, which frees their GPUs. The gateway answers every request with 503; it and the session store
    keep running."""
    paused: bool = False
    """Apply no changes. The operator only updates the status until paused is false again."""


def parse(spec: Any) -> Spec:
    """The parsed `spec`. Raises SpecError with the name of the first invalid field.

    The API server has already validated the schema; this detects an operator that is older than the CRD.
    """
    try:
        return Spec.model_validate(spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SpecError(f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


ConditionType = Literal[
    "Ready",
    "Progressing",
    "SpecValid",
    "SpeculativePoolReady",
    "GreedyPoolReady",
    "GatewayReady",
    "SessionStoreReady",
    "AutoscalingActive",
    "RouteAccepted",
    "Monitored",
    "PrefixCacheShared",
    "PrefixCacheServing",
    "DemandMeasured",
    "RoutingCalibrated",
]

REVISIONS = 5
"""Number of revisions of a pool in the status."""


class Condition(APIObject):
    """A condition as in Kubernetes' metav1.Condition."""

    type: str = Field(max_length=316)
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    reason: str = Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    """Machine-readable reason, in CamelCase."""
    message: str = Field(max_length=32768)
    """Human-readable explanation, and how to resolve the problem."""
    observed_generation: int = Field(ge=0)
    """Generation of the spec that the condition is based on."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """Time of the last change of the condition's status."""


class PoolRevision(APIObject):
    """A pod template of a pool's engines."""

    revision: str
    """Hash of the pod template."""
    engine: str
    """Runtime and version of the engine."""
    image: str
    """Image of the engine."""
    generation: int = Field(ge=0)
    """Generation of the spec when the revision was applied."""
    time: str = Field(json_schema_extra={"format": "date-time"})
    """Time when the revision was applied."""


class PoolStatus(APIObject):
    """Replicas and revisions of one pool."""

    replicas: int
    """Number of replicas."""
    ready_replicas: int
    """Number of ready replicas."""
    scaling: Literal["External"] | None = None
    """External if the operator does not set the number of replicas."""
    outdated: bool | None = None
    """True if the pool keeps the pod template of another operator release; see engine.upgradePolicy."""
    revisions: list[PoolRevision] | None = Field(default=None, max_length=REVISIONS)
    """The pod template in use, followed by the previous ones, newest first."""


class PoolsStatus(APIObject):
    """Replicas of both pools."""

    speculative: PoolStatus
    """The speculative pool."""
    greedy: PoolStatus
    """The greedy pool."""


class GatewayStatus(APIObject):
    """Replicas of the gateway, with the selector that the scale subresource needs."""

    replicas: int
    """Number of replicas."""
    ready_replicas: int
    """Number of ready replicas."""
    selector: str
    """Label selector of the gateway's pods."""


class RecommendedBudget(APIObject):
    """The best split of the GPU budget, and the best rule for moves, in the simulation."""

    speculative_replicas: int = Field(ge=1)
    """Replicas of the speculative pool."""
    greedy_replicas: int = Field(ge=1)
    """Replicas of the greedy pool."""
    load_ratio: float = Field(ge=0.001, le=1000)
    """Requests per replica of the speculative pool, divided by those of the greedy pool, towards which replicas should
    move."""


class RecommendedRouting(APIObject):
    """The result of the last calibration that has found one."""

    policy: Policy
    """Routing policy."""
    threshold_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Threshold in tokens; unset if the policy has none."""
    objective: str
    """What was minimised."""
    seconds: float
    """The minimised figure in the simulation, in seconds."""
    verdict: str
    """Whether two pools are the right answer for the simulated sessions."""
    gpu_budget: RecommendedBudget | None = None
    """The best split and rule for spec.gpuBudget; unset without one."""
    time: str = Field(json_schema_extra={"format": "date-time"})
    """Time when the calibration finished."""


class RoutingStatus(APIObject):
    """Routing policy in the gateway's configuration."""

    policy: str
    """Routing policy."""
    threshold_tokens: int | None = None
    """Threshold in tokens; unset if the spec's is null."""
    recommended: RecommendedRouting | None = None
    """The result of spec.routing.calibration; unset before the first one."""


class Allocation(APIObject):
    """How the pools share the GPU budget."""

    speculative_replicas: int
    """Replicas of the speculative pool."""
    greedy_replicas: int
    """Replicas of the greedy pool."""
    rule: Literal["EqualLoad", "Calibrated"] = "EqualLoad"
    """How replicas move. EqualLoad: towards the same number of requests per replica in both pools. Calibrated: towards
    status.routing.recommended.gpuBudget.loadRatio."""
    last_move_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """Time of the last move of a replica; unset if there was none."""

    @property
    def counts(self) -> dict[PoolName, int]:
        """The replicas by pool."""
        return {"speculative": self.speculative_replicas, "greedy": self.greedy_replicas}


class Status(APIObject):
    """Observed state of the DPSRouter."""

    model_config = ConfigDict(frozen=True)

    observed_generation: int
    """Generation of the spec that the status is based on."""
    conditions: list[Condition] = Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions. Ready is True if the spec can be applied and every component can serve."""
    url: str
    """Base URL for clients: of the Ingress or the HTTPRoute if there is one, otherwise of the Service."""
    pools: PoolsStatus
    """Replicas of both pools."""
    gateway: GatewayStatus
    """Replicas of the gateway."""
    routing: RoutingStatus | None = None
    """Routing policy in the gateway's configuration."""
    gpu_budget: Allocation | None = None
    """How the pools share spec.gpuBudget; unset without one."""
