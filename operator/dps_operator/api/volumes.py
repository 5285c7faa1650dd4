"""Volumes that several pods share."""

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject, Name, Quantity, rules

HOST_PATH = r"^/[^:]+$"


class SharedClaim(APIObject):
    """A ReadWriteMany volume that the operator creates."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.storageClassName) == has(oldSelf.storageClassName) &&"
                " (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
                "claim.storageClassName cannot be changed; remove the claim, or create a new DPSRouter",
            ),
            (
                "!quantity(string(self.size)).isLessThan(quantity(string(oldSelf.size)))",
                "claim.size cannot be decreased",
            ),
        )
    )

    size: Quantity = Field(description="Size of the volume.")
    storage_class_name: Name | None = Field(
        default=None,
        description="Storage class, which must support ReadWriteMany; the cluster's default if unset. Immutable.",
    )


class SharedVolume(APIObject):
    """A volume that the engines share: one of its fields is set, which a rule of each subclass requires."""

    host_path: str | None = Field(
        default=None,
        pattern=HOST_PATH,
        max_length=4096,
        description="Directory of the node, created if it does not exist. Only engines on the same node share it, "
        "unless it is on a network file system.",
    )
    existing_claim: Name | None = Field(
        default=None,
        description="An existing PersistentVolumeClaim. Engines on different nodes require the access mode "
        "ReadWriteMany.",
    )
    claim: SharedClaim | None = Field(
        default=None, description="A ReadWriteMany volume that the operator creates."
    )


class EmptyDirectory(APIObject):
    """A directory of the node's disk that is deleted with the pod."""

    size_limit: Quantity | None = Field(default=None, description="Maximum size; unlimited if unset.")


class EngineCache(SharedVolume):
    """A volume for what engines compile, so that they do not compile it at every start."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.hostPath), has(self.existingClaim), has(self.claim), has(self.emptyDir)]"
                ".exists_one(one, one)",
                "set exactly one of cache.hostPath, cache.existingClaim, cache.claim and cache.emptyDir",
            )
        )
    )

    empty_dir: EmptyDirectory | None = Field(
        default=None, description="A directory of each pod, which only outlives a restart of its containers."
    )
