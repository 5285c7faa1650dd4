"""The storage level of HiCache, SGLang's hierarchical cache: pages of KV that engines share through a directory.

The directory stands for Mooncake. An emulated page has no content: it is an empty file, whose name is a digest of the
request's namespace and of all tokens up to the end of the page. Engines with a draft model behave as with the plugin
dps_sglang: they neither store nor require the draft model's KV.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from dps_gateway.routing.decision import FETCH_THRESHOLD_TOKENS
from dps_local.emulated_sglang.radix import Namespace

Failure = Literal["write_error", "full", "read_error"]
"""An outcome of all writes or of all reads, as the plugin dps_sglang counts it."""

TOKENS_PER_SECOND = 350_000.0
"""20 GB/s, as in `dps simulate`, for the 56 KiB of KV that a token of Qwen2.5-7B has."""
BATCH_PAGES = 128
"""SGLang reads and writes this many pages at once, and stops after a batch of which a page failed. If a batch is not
complete when the time limit of a fetch ends, none of its pages is used."""
BACKEND = "MooncakeStore"
"""The name of the backend in `cached_tokens_details`."""


@dataclass(frozen=True)
class StorageOptions:
    """How an engine uses the storage. Durations are in emulated seconds.

    folder: engines share pages only if their folders are equal.
    draft_refill: whether the draft model prefills the tokens that were fetched.
    timeout_seconds, timeout_seconds_per_1024_tokens: the longest transfer, after which a fetch ends.
    """

    folder: Path
    page_tokens: int
    draft_refill: bool = False
    threshold_tokens: int = FETCH_THRESHOLD_TOKENS
    tokens_per_second: float = TOKENS_PER_SECOND
    timeout_seconds: float = 1.0
    timeout_seconds_per_1024_tokens: float = 0.25


@dataclass(frozen=True)
class Fetch:
    """A transfer from the storage: the prompt's length in tokens that it makes available, and its duration."""

    tokens: int
    seconds: float


class Storage:
    """The pages that all engines with the same folder share.

    count: receives the outcome of reading or writing pages, by the plugin's name for it, and their number.
    """

    def __init__(self, options: StorageOptions, count: Callable[[str, int], None]) -> None:
        self.options = options
        self.failure: Failure | None = None
        """An injected fault."""
        self.tokens_per_second = options.tokens_per_second
        self._count = count

    def write(self, tokens: Sequence[int], namespace: Namespace, attempted: int = 0) -> int:
        """Store the complete pages of `tokens`, and return how many tokens they have.

        attempted: the length of the prefix whose pages were found or written before. As in SGLang, a page that was not
        stored then is not stored later either.
        """
        size = self.options.page_tokens
        names = list(islice(self._names(tokens, namespace), attempted // size, None))
        for start in range(0, len(names), BATCH_PAGES):
            outcomes = Counter(map(self._write, names[start : start + BATCH_PAGES]))
            for outcome, pages in outcomes.items():
                self._count(outcome, pages)
            if outcomes.keys() - {"stored", "present"}:
                break
        return len(tokens) // size * size

    def fetch(self, prompt: Sequence[int], namespace: Namespace, cached: int) -> Fetch | None:
        """The transfer for a prompt of which `cached` tokens are in memory; None if SGLang would not start one."""
        options = self.options
        if len(prompt) - cached < options.threshold_tokens:
            return None
        stored = self._stored(prompt[:-1], namespace)  # the last token is always computed
        missing = stored - cached
        if missing < options.threshold_tokens:
            return None
        size = options.page_tokens
        if self.failure == "read_error":
            pages = min(missing // size, BATCH_PAGES)
            self._count(self.failure, pages)
            return Fetch(cached, pages * size / self.tokens_per_second)
        found, seconds = missing, missing / self.tokens_per_second
        requested = (len(prompt) - cached) // size * size
        limit = options.timeout_seconds + options.timeout_seconds_per_1024_tokens * requested / 1024
        if seconds > limit:
            batch = BATCH_PAGES * size
            missing = int(limit * self.tokens_per_second) // batch * batch
            found = min(found, missing + batch)  # the engine also reads the batch in progress, in vain
            seconds = limit
        self._count("read", found // size)
        return Fetch(cached + missing, seconds)

    def _write(self, name: str) -> str:
        """Store a page that the file system and the injected fault permit to store. Returns the outcome."""
        if self.failure in ("write_error", "full"):
            return self.failure
        file = self.options.folder / name
        try:
            if file.exists():
                return "present"
            self.options.folder.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError:
            return "write_error"
        return "stored"

    def _stored(self, prompt: Sequence[int], namespace: Namespace) -> int:
        """The length in tokens of the longest stored prefix."""
        pages = 0
        with suppress(OSError):  # of a directory that may not be read
            for name in self._names(prompt, namespace):
                if not (self.options.folder / name).exists():
                    break
                pages += 1
        return pages * self.options.page_tokens

    def _names(self, tokens: Sequence[int], namespace: Namespace) -> Iterator[str]:
        """The file names of the complete pages. Each page's digest includes the one of the page before it."""
        size = self.options.page_tokens
        digest = hashlib.blake2b(repr(namespace).encode(), digest_size=16)
        for end in range(size, len(tokens) + 1, size):
            digest.update(array("L", tokens[end - size : end]).tobytes())
            yield digest.hexdigest()
