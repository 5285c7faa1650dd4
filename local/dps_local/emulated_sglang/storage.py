"""The storage level of HiCache, SGLang's hierarchical cache: pages of KV that engines share through a directory.

An emulated page has no content. It is an empty file, whose name is a digest of the request's namespace and of all
tokens up to the end of the page. An engine with a draft model and without the plugin dps_sglang stores a second file
for the draft model's KV, and requires it for every page that it reads.
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

from dps_gateway.cached_prompt import FETCH_THRESHOLD_TOKENS
from dps_local.emulated_sglang.radix import Namespace
from dps_sglang.storage.directory import directory_id

Policy = Literal["best_effort", "wait_complete", "timeout"]
Failure = Literal["write_error", "full", "read_error", "rejected"]
"""An outcome of all writes or of all reads, as the plugin dps_sglang counts it. Rejected pages are removed."""

TOKENS_PER_SECOND = 350_000.0
"""20 GB/s, as in `dps simulate`, for the 56 KiB of KV that a token of Qwen2.5-7B has."""
BATCH_PAGES = 128
"""SGLang reads and writes this many pages at once, and stops after a batch of which a page failed. If a batch is not
complete when the time limit of a fetch ends, none of its pages is used."""
DRAFT_SUFFIX = ".draft"
PLUGIN_BACKEND = "SharedPrefixCache"
"""The backend of the plugin dps_sglang, as SGLang reports it."""


@dataclass(frozen=True)
class StorageOptions:
    """How an engine uses the storage. Durations are in emulated seconds.

    backend: the name of SGLang's backend in `cached_tokens_details`.
    folder: engines share pages only if their folders are equal.
    key: the key of the pages' digests; empty if file names are not keyed.
    draft_pages: whether the draft model's KV is stored and required.
    draft_refill: whether the draft model prefills the tokens that were fetched.
    timeout_seconds, timeout_seconds_per_1024_tokens: the longest transfer with the policy `timeout`.
    """

    backend: str
    folder: Path
    page_tokens: int
    key: bytes = b""
    draft_pages: bool = False
    draft_refill: bool = False
    policy: Policy = "timeout"
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
        self._suffixes = ("", DRAFT_SUFFIX) if options.draft_pages else ("",)

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
        if options.policy == "best_effort" or len(prompt) - cached < options.threshold_tokens:
            return None  # with best_effort, the prefill of an idle engine starts before the first page has arrived
        stored = self._stored(prompt[:-1], namespace)  # the last token is always computed
        missing = stored - cached
        if missing < options.threshold_tokens:
            return None
        size = options.page_tokens
        if self.failure in ("read_error", "rejected"):
            names = islice(self._names(prompt, namespace), cached // size, stored // size)
            missing = self._fail_to_read(list(islice(names, BATCH_PAGES)))
            return Fetch(cached, missing / self.tokens_per_second)
        found, seconds = missing, missing / self.tokens_per_second
        if options.policy == "timeout":
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
        files = self._files(name)
        try:
            if all(file.exists() for file in files):
                return "present"
            self.options.folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                file.touch()
        except OSError:
            return "write_error"
        return "stored"

    def _fail_to_read(self, names: Sequence[str]) -> int:
        """Count pages that cannot be read, and return how many tokens they have."""
        if self.failure == "rejected":
            for name in names:
                for file in self._files(name):
                    with suppress(OSError):
                        file.unlink()
        self._count(str(self.failure), len(names))
        return len(names) * self.options.page_tokens

    def _stored(self, prompt: Sequence[int], namespace: Namespace) -> int:
        """The length in tokens of the longest stored prefix."""
        pages = 0
        with suppress(OSError):  # of a directory that may not be read
            for name in self._names(prompt, namespace):
                if not all(file.exists() for file in self._files(name)):
                    break
                pages += 1
        return pages * self.options.page_tokens

    def _files(self, name: str) -> list[Path]:
        return [self.options.folder / (name + suffix) for suffix in self._suffixes]

    def _names(self, tokens: Sequence[int], namespace: Namespace) -> Iterator[str]:
        """The file names of the complete pages. Each page's digest includes the one of the page before it."""
        size = self.options.page_tokens
        digest = hashlib.blake2b(repr(namespace).encode(), key=self.options.key, digest_size=16)
        for end in range(size, len(tokens) + 1, size):
            digest.update(array("L", tokens[end - size : end]).tobytes())
            yield digest.hexdigest()


def shared_pages(options: StorageOptions) -> str | None:
    """What the plugin dps_sglang reports as the pages that an engine shares; None without the plugin."""
    if options.backend != PLUGIN_BACKEND:
        return None
    try:
        return f"{options.folder.name}@{directory_id(options.folder.parent)}"
    except OSError:
        return None
