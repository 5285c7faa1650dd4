"""Settings of the shared prefix cache, from SGLang's `--hicache-storage-backend-extra-config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dps_sglang.storage.store import Limits

GIBIBYTE = 2**30
SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
"""Keys of the same object that SGLang reads itself."""
SECRET_BYTES = 16
"""Minimum length of the secret."""
KEYS = {"directory", "secret_file", "max_gib", "min_free_gib", "weights"}


class SettingsError(ValueError):
    """A setting that is missing, unknown or invalid; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Where pages are stored, and the limits on their total size."""

    directory: Path
    secret_file: Path
    limits: Limits
    weights: str | None
    """A revision that identifies the model's weights; None to fingerprint the files."""

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> "Settings":
        """The settings in the extra configuration. Raises SettingsError if one is missing, unknown or invalid."""
        unknown = sorted(extra_config.keys() - KEYS - SGLANG_KEYS)
        if unknown:
            raise SettingsError(
                f"prefix cache: unknown setting {unknown[0]!r}; the known settings are {', '.join(sorted(KEYS))}"
            )
        if not extra_config.get("interface_v1"):
            raise SettingsError("prefix cache: interface_v1 must be 1")
        weights = extra_config.get("weights")
        if weights is not None and not (isinstance(weights, str) and weights):
            raise SettingsError("prefix cache: weights must be a non-empty string")
        limits = Limits(
            total_bytes=_bytes(extra_config, "max_gib"),
            minimum_free_bytes=_bytes(extra_config, "min_free_gib", 0),
        )
        return cls(_path(extra_config, "directory"), _path(extra_config, "secret_file"), limits, weights)

    def secret(self) -> bytes:
        """The content of the secret file. Raises SettingsError if it cannot be read, or is too short."""
        try:
            secret = self.secret_file.read_bytes().strip()
        except OSError as error:
            raise SettingsError(f"prefix cache: secret_file {self.secret_file}: {error.strerror}") from error
        if len(secret) < SECRET_BYTES:
            raise SettingsError(
                f"prefix cache: secret_file {self.secret_file} has {len(secret)} bytes; "
                f"use at least {SECRET_BYTES} random bytes"
            )
        return secret


def _path(extra_config: Mapping[str, Any], key: str) -> Path:
    value = extra_config.get(key)
    if not isinstance(value, str) or not value.startswith("/"):
        raise SettingsError(f"prefix cache: {key} must be an absolute path, not {value!r}")
    return Path(value)


def _bytes(extra_config: Mapping[str, Any], key: str, default: float | None = None) -> int:
    value = extra_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise SettingsError(f"prefix cache: {key} must be a size in GiB, not {value!r}")
    return int(value * GIBIBYTE)
