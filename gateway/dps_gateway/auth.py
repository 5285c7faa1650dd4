"""API keys, which identify the tenant of a request."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from dps_gateway.config import ConfigError, read_text


class Unauthorized(Exception):
    """The request carries no API key, or an unknown one."""


class Keys:
    """The valid API keys, kept as digests. Digests are compared in constant time."""

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = dict(tenants)
        self._first: dict[str, bytes] = {}
        for digest, tenant in self._tenants.items():
            self._first.setdefault(tenant, digest)

    @classmethod
    def load(cls, path: Path) -> "Keys":
        """Read lines of the form TENANT:KEY; lines that start with `#` are comments.

        Raises ConfigError, whose message never contains a key.
        """
        lines = read_text(path, "auth.keysFile").splitlines()
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            tenant, colon, key = line.strip().partition(":")
            if not (colon and tenant.strip() and key.strip()):
                raise ConfigError(f"auth.keysFile: {path}, line {number} is not of the form TENANT:KEY")
            tenants[_digest(key.strip())] = tenant.strip()
        return cls(tenants)

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that have a key."""
        return frozenset(self._tenants.values())

    def secret(self, tenant: str) -> bytes:
        """32 bytes that only the gateways and the tenant can compute. They change only with the tenant's first key."""
        return hashlib.blake2b(tenant.encode(), key=self._first[tenant], digest_size=32).digest()

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of the API key in the request's headers. Raises Unauthorized."""
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        presented = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not presented:
            raise Unauthorized("an API key is required: send 'Authorization: Bearer KEY'")
        digest, tenant = _digest(presented), None
        for known, name in self._tenants.items():
            if hmac.compare_digest(known, digest):
                tenant = name
        if tenant is None:
            raise Unauthorized("the API key is not valid")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
