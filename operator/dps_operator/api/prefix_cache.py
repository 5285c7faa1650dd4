"""`spec.prefixCache`: the prefix cache that the engines of both pools share."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject, PodTemplate, Quantity, Resources, rules
from dps_operator.api.volumes import SharedVolume


class FileBackend(SharedVolume):
    """A directory that every engine mounts."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.hostPath), has(self.existingClaim), has(self.claim)].exists_one(one, one)",
                "set exactly one of file.hostPath, file.existingClaim and file.claim",
            )
        )
    )


class MooncakeMaster(APIObject):
    """A Mooncake master that the operator deploys."""

    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image with the command mooncake_master; if unset, the image of the greedy pool's "
        "engines.",
    )
    resources: Resources = Field(default=Resources(), description="Resources of the container.")
    pod_template: PodTemplate = Field(
        default=PodTemplate(),
        description="Pod template to merge into the generated one, for example with pull secrets and a node selector.",
    )


class MooncakeBackend(APIObject):
    """Host memory of the engines, which Mooncake combines into one store."""

    model_config = ConfigDict(
        json_schema_extra=rules(
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
    )

    segment_size: Quantity = Field(
        description="Host memory that each engine contributes, for example 64Gi. It is added to the engine's default "
        "memory request, and divided between the processes of a tensor-parallel engine."
    )
    protocol: Literal["TCP", "RDMA"] = Field(
        default="TCP",
        description="How engines transfer pages. RDMA adds the capability IPC_LOCK to the engines; request the "
        "cluster's RDMA resource in the resources of both pools.",
    )
    devices: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=63)]] = Field(
        default=[],
        max_length=32,
        description="RDMA devices, for example mlx5_0; all that Mooncake finds if empty.",
    )
    master: MooncakeMaster | None = Field(
        default=None, description="The Mooncake master that the operator deploys."
    )
    external_master: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:[0-9]{1,5}$",
        max_length=259,
        description="Address of your own Mooncake master, as host:port. No master is deployed.",
    )


class PrefixCache(APIObject):
    """A prefix cache that the engines of both pools share, for SGLang 0.5.23."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.mode == 'Separate' || self.backend != 'File' || (has(self.file) && has(self.size))",
                "mode Common with backend File requires prefixCache.file and prefixCache.size",
            ),
            (
                "self.mode == 'Separate' || self.backend != 'Mooncake' || has(self.mooncake)",
                "mode Common with backend Mooncake requires prefixCache.mooncake",
            ),
            (
                "self.backend == 'File' || !(has(self.file) || has(self.size) || has(self.minFree))",
                "prefixCache.file, prefixCache.size and prefixCache.minFree require backend File; backend Mooncake "
                "stores mooncake.segmentSize per engine",
            ),
            (
                "self.backend == 'Mooncake' || !has(self.mooncake)",
                "prefixCache.mooncake requires backend Mooncake",
            ),
            (
                "!has(self.size) || quantity(string(self.size)).isGreaterThan(quantity('0'))",
                "prefixCache.size must be greater than 0",
            ),
            (
                "!has(self.size) || !has(self.file) || !has(self.file.claim) ||"
                " !quantity(string(self.size)).isGreaterThan(quantity(string(self.file.claim.size)))",
                "prefixCache.size must not exceed prefixCache.file.claim.size",
            ),
        )
    )

    mode: Literal["Separate", "Common"] = Field(
        default="Separate",
        description="Separate: each engine has its own prefix cache. Common: engines also read the KV pages that other "
        "engines of the DPSRouter have stored; the condition PrefixCacheShared states whether this is possible.",
    )
    backend: Literal["File", "Mooncake"] = Field(
        default="File",
        description="Where pages are stored. File: in a directory. Mooncake: in the host memory of the engines.",
    )
    file: FileBackend | None = Field(
        default=None, description="The directory of backend File. Required by mode Common with this backend."
    )
    mooncake: MooncakeBackend | None = Field(
        default=None,
        description="Settings of backend Mooncake. Required by mode Common with this backend.",
    )
    size: Quantity | None = Field(
        default=None,
        description="Limit of the total size of all pages of backend File, for example 200Gi. Required by mode Common "
        "with this backend.",
    )
    min_free: Quantity | None = Field(
        default=None,
        description="Free space that backend File leaves on the file system, for example 20Gi; none if unset.",
    )
