"""The geometry of a KV cache page: everything that determines its bytes. Its digest keeps incompatible pages apart."""

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Geometry:
    """Everything that determines the bytes of a page, apart from the tokens.

    Two engines may read each other's pages only if all of these are equal.
    """

    engine_version: str
    weights: str
    """Fingerprint or revision of the target model's weights and configuration."""
    compute_dtype: str
    kv_dtype: str
    pool: str
    """Class of the host memory pool, which fixes the order of bytes within a page."""
    layout: str
    page_tokens: int
    page_bytes: int
    shard: str
    """Rank and size in every parallel dimension: tensor, pipeline and context parallelism."""
    options: str = ""
    """Other engine options that change KV, such as quantization and model overrides."""

    def digest(self) -> bytes:
        """SHA-256 of the fields in canonical form."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()
