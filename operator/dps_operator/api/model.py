"""What is served: `spec.model`, `spec.engine` and `spec.nodePool`."""

from typing import Literal

from pydantic import ConfigDict, Field

from dps_engines.sglang.runtime import DEFAULT_VERSION, REPOSITORY
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


class ModelCache(APIObject):
    """A volume that keeps downloaded models, so that an engine's restart does not download them again."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.size) != has(self.existingClaim)",
                "set either cache.size, for a volume of the operator's, or cache.existingClaim, not both",
            ),
            (
                "has(self.size) || !has(self.storageClassName)",
                "cache.storageClassName needs cache.size; an existing claim has its class already",
            ),
            (
                "!has(self.size) || !has(oldSelf.size) || (has(self.storageClassName) =="
                " has(oldSelf.storageClassName) && (!has(self.storageClassName) ||"
                " self.storageClassName == oldSelf.storageClassName))",
                "cache.storageClassName cannot be changed; remove the cache, or make a new DPSRouter",
            ),
            (
                "!has(self.size) || !has(oldSelf.size) || self.accessMode == oldSelf.accessMode",
                "cache.accessMode cannot be changed; remove the cache, or make a new DPSRouter",
            ),
            (
                "!has(self.size) || !has(oldSelf.size) ||"
                " !quantity(string(self.size)).isLessThan(quantity(string(oldSelf.size)))",
                "cache.size can only grow",
            ),
        )
    )

    size: Quantity | None = Field(
        default=None, description="Size of the volume that the operator makes, such as 100Gi."
    )
    storage_class_name: Name | None = Field(
        default=None,
        description="Storage class of that volume; the cluster's default when left out. Cannot be changed.",
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        default="ReadWriteMany",
        description=(
            "ReadWriteMany: one volume shared by all engine pods (Filestore, EFS, Azure Files). "
            "ReadWriteOnce: each engine pod gets a disk of its own that lives as long as the pod."
        ),
    )
    existing_claim: Name | None = Field(
        default=None, description="A PersistentVolumeClaim of yours, mounted at /models in every engine pod."
    )


class ServedModel(APIObject):
    """The target model, which both pools serve."""

    name: str = Field(
        min_length=1,
        max_length=512,
        description=(
            "Model id on the Hugging Face hub, such as Qwen/Qwen2.5-7B-Instruct, or a path under /models "
            "on the cache volume."
        ),
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="The name that clients send as `model`; model.name when left out.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret key holding a Hugging Face token, for models that ask for one."
    )
    cache: ModelCache | None = Field(
        default=None, description="Keeps downloaded models; without it every pod downloads them at its start."
    )


class Engine(APIObject):
    """The inference engine of both pools."""

    runtime: Literal["SGLang"] = Field(default="SGLang", description="The engine.")
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description=f"Container image; {REPOSITORY}:v<version> when left out.",
    )
    version: str | None = Field(
        default=None,
        pattern=r"^[0-9]+\.[0-9]+\.[0-9]+([.-]?(post|rc|dev)[0-9]+)?$",
        max_length=64,
        description=(
            "Version of SGLang, which decides the arguments; read from the image's tag when left out, "
            f"{DEFAULT_VERSION} where that tells nothing."
        ),
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=16, description="GPUs of one replica, over which the model is split."
    )
    args: list[str] = Field(
        default=[],
        max_length=128,
        description="Arguments added to the engine in both pools. Those that the operator sets are refused.",
    )
    env: list[EnvVar] = Field(default=[], max_length=128, description="Environment added in both pools.")


class NodePool(APIObject):
    """Which nodes the engine pods run on. Gateway and Redis pods are never placed by it."""

    profile: Literal["A100-80GB", "A100-40GB", "None"] = Field(
        default="A100-80GB",
        description=(
            "Nodes with that GPU on GKE, EKS (node groups, Karpenter, Auto Mode), AKS, or labelled by "
            "NVIDIA's GPU feature discovery, and the usual GPU taints tolerated. None: only what is below."
        ),
    )
    node_selector: dict[str, str] = Field(default={}, description="Labels that the node must have as well.")
    tolerations: list[Toleration] = Field(
        default=[], max_length=32, description="Tolerations added to the profile's."
    )
    affinity: FreeObject = Field(
        default={}, description="Affinity that must hold beside the profile's, as in a pod."
    )
