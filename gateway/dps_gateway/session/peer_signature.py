"""How gateway replicas prove to each other that they know the token of the admin port, without sending it.

A request contains a random number, the digest of its body, and a MAC (HMAC-SHA256, RFC 2104) of them. The answer
contains a MAC of its own content and of that number, so that an answer to another request cannot be repeated. Requests
can be repeated by whoever can read them. This module performs no I/O.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final, Self

SIGNATURE: Final = "x-dps-peer-signature"
"""The header of an answer that contains its signature."""

_SCHEME: Final = "DPS-Peer"
_NONCE_BYTES: Final = 16
_PARTS: Final = 3
"""A nonce, a digest and a signature."""


def _nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The signed parts of a request to a peer's admin port, and the token of that port."""

    token: str
    method: str
    path: str
    digest: str
    """The SHA-256 digest of the body, so that the signature can be checked before the body arrives."""
    nonce: str = field(default_factory=_nonce)
    """A random number, which distinguishes this request from all others."""

    @classmethod
    def of(cls, token: str, method: str, path: str, body: bytes) -> Self:
        """A new request with this body."""
        return cls(token, method, path, _digest(body))

    @property
    def authorization(self) -> str:
        """The value of the header `Authorization`."""
        signature = self._signature("request", f"{self.method}\n{self.path}\n{self.digest}".encode())
        return f"{_SCHEME} {self.nonce} {self.digest} {signature}"

    def contains(self, body: bytes) -> bool:
        """Whether this is the body that was signed."""
        return self.digest == _digest(body)

    def answer_signature(self, body: bytes) -> str:
        """The signature of the answer with this body."""
        return self._signature("answer", body)

    def is_answered_by(self, signature: str, body: bytes) -> bool:
        """Whether the sender of an answer with this signature and body knows the token and received this request."""
        return _equal(signature, self.answer_signature(body))

    def _signature(self, kind: str, content: bytes) -> str:
        signed = f"{kind}\n{self.nonce}\n".encode() + content
        return hmac.new(self.token.encode(), signed, hashlib.sha256).hexdigest()


def signed_request(token: str, authorization: str, method: str, path: str) -> SignedRequest | None:
    """A request that was received with this header `Authorization`; None if it is not signed with the token."""
    scheme, *parts = authorization.split(" ")
    if scheme != _SCHEME or len(parts) != _PARTS or not authorization.isascii():
        return None
    nonce, digest, _ = parts
    request = SignedRequest(token, method, path, digest, nonce)
    return request if _equal(authorization, request.authorization) else None


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _equal(received: str, expected: str) -> bool:
    """Whether two signatures are equal, compared in constant time."""
    return hmac.compare_digest(received.encode("utf-8", "surrogateescape"), expected.encode())
