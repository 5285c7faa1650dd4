"""Where a prompt first differs from an earlier one: fingerprints of its first messages. This module performs no I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dps_gateway.prompt.boundaries import Mark, Prefixes

MAX_MESSAGES: Final = 16
"""The number of messages, from the first, that have a fingerprint."""

_FINGERPRINT_CHARS: Final = 4

_ROLE: Final = re.compile(rb"(system|developer|user|assistant|model|tool|ipython)\b")
"""The roles that chat templates write at the start of a message. Anything else could be a part of its content."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first message that differs."""

    message: int
    """Its index in the rendered prompt, which may have messages that the request has not. MAX_MESSAGES stands for this
    and all later messages."""
    role: str | None
    """None if it is unknown."""
    byte: int
    """The offset at which it begins in the new prompt."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The beginnings of the first messages of a prompt."""

    data: bytes
    """The rendered prompt."""
    split_token: bytes
    """The special token with which each message begins; empty if there is none."""
    starts: Sequence[int]
    """The offsets of at most MAX_MESSAGES + 1 messages, in bytes."""
    fingerprints: str
    """A few characters for each message except the last, from the digest of the prompt up to the message's end."""

    @classmethod
    def of(cls, data: bytes, marks: Sequence[Mark], split_token: bytes | None) -> "Outline":
        """The outline of a rendered prompt, in which `split_token` begins each message. Without it, it is empty."""
        starts: list[int] = []
        at = data.find(split_token) if split_token else -1
        while split_token and at != -1 and len(starts) <= MAX_MESSAGES:
            starts.append(at)
            at = data.find(split_token, at + 1)
        # Not the prompt's own digests: those of earlier prefixes than the last one are hashed from the start.
        prefixes = Prefixes(data, marks)
        digests = [prefixes.digest(end) or "" for end in starts[1:]]
        fingerprints = "".join(digest[:_FINGERPRINT_CHARS] for digest in digests)
        return cls(data, split_token or b"", starts, fingerprints)

    def difference(self, recorded: str) -> Difference | None:
        """The first message that differs from those with the `recorded` fingerprints; None if it is unknown."""
        if not recorded or not self.starts:
            return None
        pairs = zip(_split(recorded), _split(self.fingerprints), strict=False)
        same = 0
        for before, now in pairs:
            if before != now:
                break
            same += 1
        start = self.starts[same]
        role = _ROLE.match(self.data, start + len(self.split_token)) if same < MAX_MESSAGES else None
        return Difference(same, role[1].decode() if role else None, start)


def _split(fingerprints: str) -> list[str]:
    return [
        fingerprints[start : start + _FINGERPRINT_CHARS]
        for start in range(0, len(fingerprints), _FINGERPRINT_CHARS)
    ]
