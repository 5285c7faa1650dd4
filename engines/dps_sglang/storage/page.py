"""The format of one stored page: a fixed header, then the payload.

The header holds the geometry's digest and the page's name, and an HMAC-SHA256 over both and the payload. A file that
was truncated, damaged, renamed, moved from another geometry's folder, or written without the secret fails verification.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass

from dps_sglang.storage.geometry import Geometry

MAGIC = b"DPSPAGE1"
UNSIGNED = struct.Struct("<8sQ32s32s")
"""Magic, payload length in bytes, geometry digest, page name."""
MAC_BYTES = 32
HEADER_BYTES = UNSIGNED.size + MAC_BYTES


class PageError(Exception):
    """A stored page that must not be used."""


@dataclass(frozen=True)
class PageFormat:
    """Encodes and verifies pages of one geometry under one secret."""

    geometry_digest: bytes
    payload_bytes: int
    folder: str
    """Name of the geometry's folder, which reveals neither the model nor the geometry."""
    name_key: bytes
    page_key: bytes

    @classmethod
    def of(cls, geometry: Geometry, secret: bytes) -> "PageFormat":
        digest = geometry.digest()
        return cls(
            geometry_digest=digest,
            payload_bytes=geometry.page_bytes,
            folder=hmac.digest(secret, b"folder:" + digest, "sha256").hex()[:32],
            name_key=hmac.digest(secret, b"name:" + digest, "sha256"),
            page_key=hmac.digest(secret, b"page:" + digest, "sha256"),
        )

    def name(self, key: str) -> bytes:
        """The salted name of an engine's page key: without the secret, a prompt's pages cannot be recognised."""
        return hmac.digest(self.name_key, key.encode(), "sha256")

    def header(self, name: bytes, payload: memoryview) -> bytes:
        """Raises PageError if the payload does not have this geometry's size."""
        if payload.nbytes != self.payload_bytes:
            raise PageError(
                f"the page has {payload.nbytes} bytes, but the geometry requires {self.payload_bytes}"
            )
        unsigned = UNSIGNED.pack(MAGIC, payload.nbytes, self.geometry_digest, name)
        return unsigned + self._mac(unsigned, payload)

    def check_header(self, header: bytes, name: bytes, file_bytes: int) -> None:
        """Check the page without its payload. Raises PageError if name, geometry or size do not match."""
        if len(header) != HEADER_BYTES or file_bytes != HEADER_BYTES + self.payload_bytes:
            raise PageError("truncated or too long")
        if header[: UNSIGNED.size] != UNSIGNED.pack(MAGIC, self.payload_bytes, self.geometry_digest, name):
            raise PageError("written for another geometry or under another name")

    def check_payload(self, header: bytes, payload: memoryview) -> None:
        """Raises PageError if the payload is not the one that the header was written for."""
        if not hmac.compare_digest(header[UNSIGNED.size :], self._mac(header[: UNSIGNED.size], payload)):
            raise PageError("wrong checksum")

    def _mac(self, unsigned: bytes, payload: memoryview) -> bytes:
        mac = hmac.new(self.page_key, unsigned, hashlib.sha256)
        mac.update(payload)
        return mac.digest()
