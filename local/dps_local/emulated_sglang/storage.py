"""The storage level of HiCache, SGLang's hierarchical cache: pages of KV that engines share through a directory.

An emulated page has no content. It is an empty file, whose name is a digest of the request's namespace and of all
tokens up to the end of the page. An engine with a draft model and without the plugin dps_sglang stores a second file
for the draft model's KV, and requires it for every page that it reads.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dps_local.emulated_sglang.radix import Namespace
from dps_sglang.storage.directory import directory_id

Policy = Literal["best_effort", "wait_complete", "timeout"]

FETCH_THRESHOLD_TOKENS = 256
"""A shorter missing prefix is computed instead of fetched: SGLang's default of `prefetch_threshold`."""
TOKENS_PER_SECOND = 350_000.0
"""20 GB/s, as in `dps simulate`, for the 56 KiB of KV that a token of Qwen2.5-7B has."""
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
    """The pages that all engines with the same folder share."""

    def __init__(self, options: StorageOptions) -> None:
        self.options = options
        self._suffixes = ("", DRAFT_SUFFIX) if options.draft_pages else ("",)

    def write(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """Store the complete pages of `tokens`. A page that the file system refuses is not stored."""
        with suppress(OSError):
            self.options.folder.mkdir(parents=True, exist_ok=True)
            for name in self._names(tokens, namespace):
                for suffix in self._suffixes:
                    (self.options.folder / (name + suffix)).touch()

    def fetch(self, prompt: Sequence[int], namespace: Namespace, cached: int) -> Fetch | None:
        """The transfer for a prompt of which `cached` tokens are in memory; None if SGLang would not start one."""
        options = self.options
        if options.policy == "best_effort" or len(prompt) - cached < options.threshold_tokens:
            return None  # with best_effort, the prefill of an idle engine starts before the first page has arrived
        missing = self._stored(prompt[:-1], namespace) - cached  # the last token is always computed
        if missing < options.threshold_tokens:
            return None
        seconds = missing / options.tokens_per_second
        if options.policy == "timeout":
            limit = options.timeout_seconds + options.timeout_seconds_per_1024_tokens * missing / 1024
            if seconds > limit:
                missing = int(missing * limit / seconds) // options.page_tokens * options.page_tokens
                seconds = limit
        return Fetch(cached + missing, seconds)

    def _stored(self, prompt: Sequence[int], namespace: Namespace) -> int:
        """The length in tokens of the longest stored prefix."""
        pages = 0
        with suppress(OSError):  # of a directory that may not be read
            for name in self._names(prompt, namespace):
                if not all((self.options.folder / (name + suffix)).exists() for suffix in self._suffixes):
                    break
                pages += 1
        return pages * self.options.page_tokens

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
