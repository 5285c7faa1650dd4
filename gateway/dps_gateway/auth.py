"""API keys, which identify the tenant of a request and limit what it may do."""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dps_gateway.config import ConfigError, read_text

HASHED: Final = "sha256:"
"""The prefix of a hashed key. A slow hash such as scrypt protects secrets that can be guessed. Generated keys have 256
random bits, so a plain digest cannot be reversed by guessing, and checking it for every request is fast."""

URGENCIES: Final = frozenset("01234567")
"""The urgencies of RFC 9218, as they are written."""

_DIGEST_CHARS: Final = 64
_ID_CHARS: Final = 12


class Unauthorized(Exception):
    """The request carries no API key, or one that is unknown or has expired."""


class Forbidden(Exception):
    """The API key does not permit the request."""


@dataclass(frozen=True, slots=True)
class Key:
    """One API key, kept as its SHA-256 digest."""

    tenant: str
    digest: bytes
    hashed: bool = True
    """Whether the file contains the digest instead of the key."""
    expires: float | None = None
    """When the key expires, in seconds since the epoch. If None, it does not expire."""
    models: frozenset[str] | None = None
    """The model names that the key may use. If None, all of them."""
    max_in_flight: int | None = None
    """Maximum number of the key's requests in flight, in each gateway replica. If None, there is no limit."""
    requests_per_minute: int | None = None
    """Maximum number of the key's requests per minute, in each gateway replica. If None, there is no limit."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers per minute, in each gateway replica, after which the key's requests are refused. If
    None, there is no limit."""
    urgency: int | None = None
    """The highest priority that the key may request, as an urgency of RFC 9218: 0 is the highest. If None, 3."""

    @property
    def id(self) -> str:
        """A short name for the key, from its digest."""
        return self.digest.hex()[:_ID_CHARS]

    def check_models(self, body: Mapping[str, Any], default: str) -> None:
        """Raise Forbidden if a request with this body uses a model or an adapter that the key may not use.

        A request without a `model` uses `default`. An adapter in SGLang's `lora_path` is named `MODEL:ADAPTER`.
        """
        if self.models is None:
            return
        model = body.get("model") or default
        adapters = body.get("lora_path")
        names = [model]
        names += [
            f"{model}:{each}" for each in (adapters if isinstance(adapters, list) else [adapters]) if each
        ]
        if refused := [str(name) for name in names if not isinstance(name, str) or name not in self.models]:
            raise Forbidden(
                f"the API key may not use the model '{refused[0]}'; it may use {', '.join(sorted(self.models))}"
            )


class Keys:
    """The valid API keys. Digests are compared in constant time."""

    def __init__(self, keys: Iterable[Key] = (), clock: Callable[[], float] = time.time) -> None:
        self._keys = {key.digest: key for key in keys}
        self._clock = clock
        self._first: dict[str, bytes] = {}
        for key in self._keys.values():
            self._first.setdefault(key.tenant, key.digest)
        self.tenants: Final = frozenset(self._first)
        """The tenants that have a key."""

    @classmethod
    def load(cls, path: Path) -> "Keys":
        """Read a key file (see `parse_key`); lines that start with `#` are comments.

        Raises ConfigError, whose message never contains a key.
        """
        return cls(key for _, key in read_key_file(path, "auth.keysFile") if key is not None)

    def key(self, headers: Mapping[str, str]) -> Key:
        """The API key in the request's headers. Raises Unauthorized."""
        scheme, _, text = headers.get("Authorization", "").partition(" ")
        presented = text.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not presented:
            raise Unauthorized("an API key is required: send 'Authorization: Bearer KEY'")
        digest, found = digest_of(presented), None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise Unauthorized("the API key is not valid")
        if found.expires is not None and self._clock() >= found.expires:
            raise Unauthorized("the API key has expired")
        return found

    def secret(self, tenant: str) -> bytes:
        """32 bytes that only the gateways and the tenant can compute. They change only with the tenant's first key.

        Raises Unauthorized if the tenant no longer has a key.
        """
        first = self._first.get(tenant)
        if first is None:
            raise Unauthorized("the API key has been revoked")
        return hashlib.blake2b(tenant.encode(), key=first, digest_size=32).digest()


def read_key_file(path: Path, setting: str = "") -> list[tuple[str, Key | None]]:
    """The lines of a key file and their keys, which `setting` of the configuration names.

    Raises ConfigError, whose message never contains a key, if the file cannot be read or a line is invalid.
    """
    prefix = f"{setting}: " if setting else ""
    lines = read_text(path, setting).splitlines()
    keys = []
    for number, line in enumerate(lines, start=1):
        try:
            keys.append(parse_key(line))
        except ValueError as error:
            raise ConfigError(f"{prefix}{path}, line {number} {error}") from error
    return list(zip(lines, keys, strict=True))


def parse_key(line: str) -> Key | None:
    """Parse `TENANT:KEY` or `TENANT:sha256:DIGEST`, followed by options such as `expires=2027-01-31`.

    Returns None for an empty line and a comment. Raises ValueError, whose message completes the sentence "line 7 …"
    and never contains a key.
    """
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    options: dict[str, Any] = {}
    while (last := text.split()[-1]) != text and "=" in last and last.partition("=")[0] in _OPTIONS:
        name, _, value = last.partition("=")
        field, parse = _OPTIONS[name]
        options[field] = parse(name, value)
        text = text.removesuffix(last).rstrip()
    tenant, colon, secret = (part.strip() for part in text.partition(":"))
    if not (colon and tenant and secret):
        raise ValueError("is not of the form TENANT:KEY")
    hashed = secret.startswith(HASHED)
    digest = _hex_digest(secret.removeprefix(HASHED)) if hashed else digest_of(secret)
    return Key(tenant, digest, hashed, **options)


def digest_of(key: str) -> bytes:
    """The digest of a key, as a client sends it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _hex_digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(text) != _DIGEST_CHARS or len(digest) != _DIGEST_CHARS // 2:
        raise ValueError(f"contains '{HASHED}' without {_DIGEST_CHARS} hexadecimal digits after it")
    return digest


def _timestamp(name: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"contains {name}={text}; write a date or a time such as 2027-01-31") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _names(name: str, text: str) -> frozenset[str]:
    if not all(text.split(",")):
        raise ValueError(f"contains {name}={text}; write model names separated by commas, without spaces")
    return frozenset(text.split(","))


def _positive(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"contains {name}={text}; write a number above 0")
    return int(text)


def _urgency(name: str, text: str) -> int:
    if text not in URGENCIES:
        raise ValueError(f"contains {name}={text}; write a number from 0 to 7")
    return int(text)


_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str, str], Any]]]] = {
    "expires": ("expires", _timestamp),
    "models": ("models", _names),
    "maxInFlight": ("max_in_flight", _positive),
    "requestsPerMinute": ("requests_per_minute", _positive),
    "tokensPerMinute": ("tokens_per_minute", _positive),
    "urgency": ("urgency", _urgency),
}
"""The options of a line: the field of `Key`, and the function that parses the value. It raises ValueError."""
