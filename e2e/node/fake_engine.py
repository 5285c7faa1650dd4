"""fake_engine.py SEED PAGE_TOKENS: uses the common prefix cache of an engine's pod as SGLang does.

It is no engine, because it computes nothing: the content of a page follows from its key, so that a wrong page is
recognised. The storage is the plugin's own code, with the settings on the command line of the pod's engine.

In each round it fetches what is stored of a random prompt's prefix, checks every byte, and stores the rest. It prints
its process id, and then the number of pages fetched in each round. An exception or a wrong page ends it.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from dps_sglang.settings import Settings
from dps_sglang.shared_cache import SharedCache
from dps_sglang.storage.geometry import Geometry
from dps_sglang.storage.page import PageFormat
from dps_sglang.storage.store import PageStore

EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
PAGE_BYTES = 32 * 1024
PROMPTS = 6
PAGES = 24
PAUSE_SECONDS = 0.05
"""After each round, so that two of them leave time for other processes of the node."""


def settings() -> Settings:
    """The settings of the pod's engine, whose process has the id 1."""
    arguments = Path("/proc/1/cmdline").read_text().split("\0")
    return Settings.parse(json.loads(arguments[arguments.index(EXTRA_CONFIG) + 1]))


def content(key: str, page_tokens: int) -> bytes:
    """The bytes of a page, which differ between geometries."""
    return random.Random(f"{page_tokens} {key}").randbytes(PAGE_BYTES)


class Memory:
    """The host memory of an engine, by page number."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}

    def load(self, slot: int) -> memoryview:
        return memoryview(self.pages[slot])

    def buffer(self) -> memoryview:
        return memoryview(bytearray(PAGE_BYTES))

    def save(self, slot: int, page: memoryview) -> None:
        self.pages[slot] = bytes(page)


def main() -> None:
    seed, page_tokens = map(int, sys.argv[1:])
    print(os.getpid(), flush=True)
    known = settings()
    geometry = Geometry(
        engine_version="fake",
        weights="fake",
        compute_dtype="uint8",
        kv_dtype="uint8",
        pool="bytes",
        layout="page_first",
        page_tokens=page_tokens,
        page_bytes=PAGE_BYTES,
        shard="tp 0/1",
    )
    store = PageStore(known.directory, PageFormat.of(geometry, known.secret()), known.limits)
    prompts = random.Random(seed)
    while True:
        prompt = prompts.randrange(PROMPTS)
        keys = [f"{prompt} {page}" for page in range(PAGES)]
        memory = Memory()
        cache = SharedCache(store, memory)
        stored = cache.prefix_pages(keys)
        fetched = cache.read(keys[:stored], range(stored))
        for page, arrived in enumerate(fetched):
            if arrived and memory.pages[page] != content(keys[page], page_tokens):
                raise SystemExit(f"wrong page: {keys[page]}")
        missing = [page for page in range(PAGES) if page >= stored or not fetched[page]]
        memory.pages |= {page: content(keys[page], page_tokens) for page in missing}
        cache.write([keys[page] for page in missing], missing)
        cache.close()
        print(sum(fetched), flush=True)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
