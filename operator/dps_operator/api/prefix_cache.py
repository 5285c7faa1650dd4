"""`spec.prefixCache`: the prefix cache that the engines of both pools share."""

from decimal import Decimal
from typing import Literal

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject, Name, Quantity, rules
from dps_operator.api.volumes import HOST_PATH, SharedClaim

_UNITS = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000**power) for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    **{unit: Decimal(1024**power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}


def quantity_bytes(quantity: str) -> int:
    """A Kubernetes quantity in bytes, rounded down."""
    number = quantity.rstrip("EGKMPTikm")
    return int(Decimal(number) * _UNITS[quantity[len(number) :]])


class FileBackend(APIObject):
    """A directory that every engine mounts."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.hostPath), has(self.existingClaim), has(self.claim)].exists_one(one, one)",
                "set exactly one of file.hostPath, file.existingClaim and file.claim",
            )
        )
    )

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


class PrefixCache(APIObject):
    """A prefix cache that the engines of both pools share, for SGLang 0.5.23."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.mode == 'Separate' || (has(self.file) && has(self.size))",
                "mode Common requires prefixCache.file and prefixCache.size",
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
    backend: Literal["File"] = Field(
        default="File", description="Where pages are stored. File: in a directory."
    )
    file: FileBackend | None = Field(
        default=None, description="The directory of backend File. Required by mode Common."
    )
    size: Quantity | None = Field(
        default=None,
        description="Limit of the total size of all pages, for example 200Gi. Required by mode Common.",
    )
    min_free: Quantity = Field(
        default="0", description="Free space to leave on the file system, for example 20Gi."
    )
