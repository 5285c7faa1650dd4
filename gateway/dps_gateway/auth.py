"""API keys: which tenant a request belongs to."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from dps_gateway.config import ConfigError


class Unauthorized(Exception):
    """The client gave no API key, or one that is not known."""


class Keys:
    """The known keys, as digests. Comparing digests takes the same time whatever the key has in common."""

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = dict(tenants)

    @classmethod
    def load(cls, path: Path) -> "Keys":
        """Read lines of TENANT:KEY; `#` starts a comment. Raises ConfigError, which never shows a key."""
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"auth.keysFile: {path} cannot be read: {error.strerror}") from error
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            tenant, colon, key = line.strip().partition(":")
            if not (colon and tenant.strip() and key.strip()):
                raise ConfigError(f"auth.keysFile: {path}, line {number}: write TENANT:KEY")
            tenants[_digest(key.strip())] = tenant.strip()
        return cls(tenants)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant whose key the request carries. Raises Unauthorized."""
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            raise Unauthorized("an API key is needed: send 'Authorization: Bearer KEY'")
        digest, tenant = _digest(given), None
        for known, name in self._tenants.items():
            if hmac.compare_digest(known, digest):
                tenant = name
        if tenant is None:
            raise Unauthorized("this API key is not known")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
