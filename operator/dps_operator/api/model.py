"""`spec.model`, `spec.engine` and `spec.nodePool`: the model, the engine, and the nodes for it."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from dps_engines.launch import TENSOR_PARALLEL_LIMITS
from dps_engines.sglang.runtime import DEFAULT_VERSION as SGLANG_VERSION
from dps_engines.sglang.runtime import REPOSITORY as SGLANG_REPOSITORY
from dps_engines.vllm.runtime import DEFAULT_VERSION as VLLM_VERSION
from dps_engines.vllm.runtime import REPOSITORY as VLLM_REPOSITORY
from dps_operator.api.shapes import checked_affinity, without_nulls
from dps_operator.api.sources import ModelSource
from dps_operator.api.types import (
    APIObject,
    EnvVar,
    FreeObject,
    Name,
    Quantity,
    SecretKeyRef,
    Toleration,
    rules,
)
from dps_operator.api.volumes import EngineCache

Runtime = Literal["SGLang", "VLLM"]
VERSION_PATTERN = r"^[0-9]+\.[0-9]+\.[0-9]+([.-]?(post|rc|dev)[0-9]+)?$"


class ModelCache(APIObject):
    """A volume for downloaded models, so that an engine does not download its model at every start."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.size) != has(self.existingClaim)",
                "set either cache.size, for a volume that the operator creates, or cache.existingClaim, not both",
            ),
            (
                "has(self.size) || !has(self.storageClassName)",
                "cache.storageClassName requires cache.size; an existing claim already has a storage class",
            ),
            (
                "!has(self.size) || !has(oldSelf.size) || (has(self.storageClassName) =="
                " has(oldSelf.storageClassName) && (!has(self.storageClassName) ||"
                " self.storageClassName == oldSelf.storageClassName))",
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
    )

    size: Quantity | None = Field(
        default=None, description="Size of the volume that the operator creates, for example 100Gi."
    )
    storage_class_name: Name | None = Field(
        default=None,
        description="Storage class of that volume; the cluster's default if unset. Immutable.",
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        default="ReadWriteMany",
        description=(
            "ReadWriteMany: one volume shared by all engine pods (Filestore, EFS, Azure Files). "
            "ReadWriteOnce: a separate disk for each engine pod, deleted with the pod."
        ),
    )
    existing_claim: Name | None = Field(
        default=None, description="An existing PersistentVolumeClaim, mounted at /models in every engine pod."
    )


class Adapter(APIObject):
    """A LoRA adapter of the model."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=63,
        description="Requests with the model <servedName>:<name> use the adapter.",
    )
    path: str = Field(
        pattern=r"^[^=,\s]+$",
        max_length=512,
        description="A model id on the Hugging Face Hub, or a path in the engine's container, for example under "
        "/models.",
    )


class ServedModel(APIObject):
    """The target model, served by both pools."""

    model_config = ConfigDict(
        json_schema_extra=rules(
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
    )

    name: str = Field(
        min_length=1,
        max_length=512,
        description=(
            "Model id on the Hugging Face Hub, for example Qwen/Qwen2.5-7B-Instruct, or a path under /models, "
            "where the cache volume is mounted. With model.source, only a name."
        ),
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Name that clients send as `model`; model.name if unset.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Branch, tag or commit of the model on the Hub; its default branch if unset.",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description=(
            "Tokenizer of the engines and the gateway: a model id or a path, as in model.name; the model's if unset. "
            "Required if model.name is a URL, such as s3://…."
        ),
    )
    source: ModelSource | None = Field(
        default=None,
        description="Where the model's files are; the Hugging Face Hub, or the path in model.name, if unset.",
    )
    adapters: list[Adapter] = Field(
        default=[],
        max_length=64,
        description="LoRA adapters that the engines of both pools load when they start. SGLang supports them with "
        "Ngram and, since 0.5.23, with Eagle and Eagle3.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret key with a Hugging Face token, for gated and private models."
    )
    cache: ModelCache | None = Field(
        default=None,
        description="Volume for downloaded models; if unset, each pod downloads the models when it starts.",
    )


class Engine(APIObject):
    """The inference engine of both pools."""

    runtime: Runtime = Field(
        default="SGLang", description="Inference engine. A pool with a runtime of its own uses that instead."
    )
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
    api_key_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret key with the API key that the engines of both pools require and that the gateways send; "
        "if unset, engines accept every client.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=TENSOR_PARALLEL_LIMITS[0],
        le=TENSOR_PARALLEL_LIMITS[1],
        description="GPUs per replica, across which the model is split. The numbers of attention heads of the model "
        "and of the draft model, and the sizes of their MLPs, must be multiples of it.",
    )
    cache: EngineCache | None = Field(
        default=None,
        description="Volume for kernels and graphs that the engines compile, mounted at /engine-cache; if unset, "
        "each pod compiles them when it starts.",
    )
    args: list[str] = Field(
        default=[],
        max_length=128,
        description="Additional engine arguments for both pools. Arguments that the operator sets are rejected.",
    )
    env: list[EnvVar] = Field(
        default=[], max_length=128, description="Additional environment variables for both pools."
    )


class MIG(APIObject):
    """Instances of GPUs that MIG divides."""

    profile: str = Field(
        pattern=r"^[1-7]g\.[0-9]+gb$",
        max_length=16,
        description="Profile of the GPU instances, for example 3g.40gb, half of an A100 80GB.",
    )
    strategy: Literal["Single", "Mixed"] = Field(
        default="Single",
        description="MIG strategy of NVIDIA's device plugin. Single: instances are requested as nvidia.com/gpu, and "
        "nodes are selected by the labels of GPU Feature Discovery or GKE. Mixed: instances are requested as "
        "nvidia.com/mig-<profile>.",
    )


class GPUSharing(APIObject):
    """How NVIDIA's device plugin offers each GPU to two pods."""

    strategy: Literal["TimeSlicing", "MPS"] = Field(
        default="TimeSlicing",
        description="TimeSlicing: the engines share the memory, which the operator divides. MPS: the device plugin "
        "limits each engine to half of the memory and of the compute capacity.",
    )
    renamed: bool = Field(
        default=False,
        description="Whether the device plugin's option renameByDefault is set. The names of the resources then end in "
        ".shared, as in nvidia.com/gpu.shared.",
    )


class NodePool(APIObject):
    """The nodes for engine pods. Does not apply to gateway and Redis pods."""

    profile: Literal["A100-80GB", "A100-40GB", "None"] = Field(
        default="A100-80GB",
        description=(
            "Selects nodes with this GPU by the labels of GKE, EKS (node groups, Karpenter, Auto Mode), AKS or NVIDIA "
            "GPU Feature Discovery, and tolerates the taints nvidia.com/gpu and sku=gpu. With None, nodes are not "
            "selected by GPU, and these taints are not tolerated."
        ),
    )
    mig: MIG | None = Field(
        default=None,
        description="Each engine gets an instance of a GPU that MIG divides; if unset, GPUs that are not divided.",
    )
    sharing: GPUSharing = Field(
        default=GPUSharing(), description="How the GPUs are shared with placement SharedGPU."
    )
    node_selector: dict[str, str] = Field(
        default={}, description="Labels that nodes must have in addition to those that `profile` requires."
    )
    tolerations: list[Toleration] = Field(
        default=[], max_length=32, description="Tolerations in addition to those of `profile`."
    )
    affinity: Annotated[FreeObject, BeforeValidator(without_nulls), AfterValidator(checked_affinity)] = Field(
        default={},
        description="Affinity in addition to that of `profile`, as in a pod. Both must be satisfied.",
    )
