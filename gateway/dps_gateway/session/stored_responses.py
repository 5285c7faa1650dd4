"""Where an answer of the Responses API is stored, for requests that refer to it. This module performs no I/O."""

import hashlib
from dataclasses import dataclass

import orjson

from dps_gateway.pool import Pool
from dps_gateway.session.identity import TAG_CHARS, Scope
from dps_gateway.session.record import MAX_NUMBER


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The engine that holds a response, and the turn that the response belongs to."""

    pool: Pool
    url: str
    """The replica's base URL."""
    session: str = ""
    """The id of the session (`SessionId.text`); empty if the request was not a turn of one."""
    digest: str = ""
    """The digest of the turn's point in the session's record."""
    tokens: int = 0
    """The length of the prompt and the answer, without the token that ends the answer; 0 if unknown."""

    def encode(self) -> bytes:
        """Serialize to a JSON array."""
        return orjson.dumps([self.pool.value, self.url, self.session, self.digest, self.tokens])

    @classmethod
    def decode(cls, raw: bytes) -> "StoredResponse | None":
        """Parse the stored form. Returns None for anything else."""
        try:
            pool, url, session, digest, tokens = orjson.loads(raw)
            if not 0 <= tokens <= MAX_NUMBER:
                return None
            return cls(Pool(pool), str(url), str(session), str(digest), int(tokens))
        except (TypeError, ValueError):
            return None


def response_key(scope: Scope, response_id: str) -> str:
    """The key of a response in a shared store. It contains the id as a hash, and belongs to one tenant."""
    digest = hashlib.blake2b(response_id.encode(errors="replace"), digest_size=16).hexdigest()
    return f"dps:{{{scope.name}:{digest[:TAG_CHARS]}}}:r:{digest}"
