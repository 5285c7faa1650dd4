"""API keys, which identify the tenant of a request, and what keys and tenants may use: requests, tokens, and memory for
bodies. Limits apply to each gateway replica."""

import hashlib
import hmac
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dps_gateway.config import ConfigError, Limits, read_text

HASHED: Final = "sha256:"
"""The prefix of a hashed key. A slow hash such as scrypt protects secrets that can be guessed. Generated keys have 256
random bits, so a plain digest cannot be reversed by guessing, and checking it for every request is fast."""

URGENCIES: Final = frozenset("01234567")
"""The urgencies of RFC 9218, as they are written."""

MINUTE_SECONDS: Final = 60.0

_ROUNDING_SECONDS: Final = 0.001
_DIGEST_CHARS: Final = 64
_ID_CHARS: Final = 12


class Unauthorized(Exception):
    """The request carries no API key, or one that is unknown or has expired."""


class Forbidden(Exception):
    """The API key does not permit the request."""


class KeyBusy(Exception):
    """The API key has reached its limit of requests in flight."""


class KeyExhausted(Exception):
    """The API key has reached a limit per minute."""

    def __init__(self, limit: str, retry_after_seconds: int) -> None:
        super().__init__(f"the API key may use at most {limit} per minute")
        self.retry_after_seconds = retry_after_seconds


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


class KeyLimits:
    """Counts what each API key uses.

    The use within a minute is a sliding-window estimate from two counters: the use in the current minute of the clock,
    plus the previous minute's use times the share of that minute that is less than 60 s ago.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight: Counter[bytes] = Counter()
        self._minute = 0
        """The current minute, or an earlier one if nothing has been counted since."""
        self._used: Counter[tuple[int, bytes, str]] = Counter()
        """What has been counted, by minute, key and kind: `requests` or `tokens`."""

    def enter(self, key: Key) -> None:
        """Count a request, which is in flight until `leave` is called.

        Raises KeyBusy or KeyExhausted if the key has reached a limit; the request then does not count.
        """
        limit = key.max_in_flight
        if limit is not None and self._in_flight[key.digest] >= limit:
            raise KeyBusy(f"the API key may have at most {limit} requests in flight")
        for kind, per_minute in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if per_minute is not None and (wait := self._wait_seconds(key, kind, per_minute)):
                raise KeyExhausted(f"{per_minute} {kind}", wait)
        self._in_flight[key.digest] += 1
        if key.requests_per_minute is not None:
            self._used[self._now()[0], key.digest, "requests"] += 1

    def leave(self, key: Key, tokens: int = 0) -> None:
        """Stop counting a request as in flight, and count the tokens that it used."""
        self._in_flight[key.digest] -= 1
        if not self._in_flight[key.digest]:
            del self._in_flight[key.digest]
        if key.tokens_per_minute is not None:
            self._used[self._now()[0], key.digest, "tokens"] += tokens

    def _wait_seconds(self, key: Key, kind: str, limit: int) -> int:
        """The seconds until a key has used less than `limit` within a minute. 0 if it has not used more now."""
        minute, fraction = self._now()
        used, before = (self._used[each, key.digest, kind] for each in (minute, minute - 1))
        if used + before * (1 - fraction) < limit:
            return 0
        # Later in this minute, when enough of the previous one is more than a minute ago, or else in the next minute.
        part = 1 - (limit - used) / before if used < limit else 2 - limit / used
        return math.floor((part - fraction) * MINUTE_SECONDS + _ROUNDING_SECONDS) + 1

    def _now(self) -> tuple[int, float]:
        """The current minute, and the fraction of it that has passed. Older minutes than the previous are forgotten."""
        fraction, minute = math.modf(self._clock() / MINUTE_SECONDS)
        if minute != self._minute:
            self._minute = int(minute)
            for entry in [each for each in self._used if each[0] < self._minute - 1]:
                del self._used[entry]
        return self._minute, fraction


class BodyBudget:
    """Counts the bytes of the bodies that this process holds, up to limits.maxBufferedBytes.

    That limit is at least limits.maxBodyBytes. If there are several tenants, one of them holds at most as many bytes as
    it leaves free, or one body of the maximum size (Choudhury and Hahne: Dynamic Queue Length Thresholds for
    Shared-Memory Packet Switches, 1998). Of two tenants that send as much as they can, each therefore holds a third,
    and the last third remains for others.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        """The bytes that are reserved, by tenant."""
        self.used = 0
        """The bytes that are reserved."""

    def reserve(self, tenant: str, size: int, limits: Limits, *, shared: bool) -> bool:
        """Reserve `size` bytes for a tenant until they are released. Returns whether there was room for them.

        shared: whether there are several tenants.
        """
        free = max(limits.max_buffered_bytes, limits.max_body_bytes) - self.used - size
        if free < 0 or (shared and self._held[tenant] + size > max(free, limits.max_body_bytes)):
            return False
        self.used += size
        self._held[tenant] += size
        return True

    def release(self, tenant: str, size: int) -> None:
        """Release bytes that have been reserved."""
        self.used -= size
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]


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
    while (last := text.split()[-1]) != text and "=" in last and last.partition("=")[0] in KEY_OPTIONS:
        name, _, value = last.partition("=")
        field, parse, *_ = KEY_OPTIONS[name]
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


KEY_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str, str], Any], str, str]]] = {
    "expires": ("expires", _timestamp, "TIME", "when the key expires, such as 2027-01-31 (UTC)"),
    "models": ("models", _names, "NAME[,NAME]", "the only models that the key may use"),
    "maxInFlight": ("max_in_flight", _positive, "NUMBER", "maximum number of its requests in flight"),
    "requestsPerMinute": (
        "requests_per_minute",
        _positive,
        "NUMBER",
        "maximum number of its requests per minute",
    ),
    "tokensPerMinute": (
        "tokens_per_minute",
        _positive,
        "NUMBER",
        "tokens of prompts and answers per minute after which its requests are refused",
    ),
    "urgency": ("urgency", _urgency, "NUMBER", "the highest priority that it may request, from 0 to 7"),
}
"""The options of a line: the field of `Key`, the function that parses the value, and its placeholder and description in
the help of `dps keys`. The function raises ValueError."""
