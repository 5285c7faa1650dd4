"""engine.py ROOT PAGE_TOKENS PAGES_PER_SHARD SEED [pause]: a process that uses a store as an engine does, until killed.

In each round it fetches what is stored of a random prompt's prefix, checks it, and stores the rest, eight pages at a
time. It prints the number of pages that were fetched. An exception or a wrong page ends it.
pause: it prints `fetching` and waits when the first page of a fetch has arrived.
"""

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from dps_sglang.shared_cache import SharedCache
from tests.plugin.pages import GEOMETRY, Memory, payload, store

PROMPTS = 6
PAGES = 24


def keys(prompt: int) -> list[str]:
    """The keys of a prompt's pages."""
    return [f"{prompt} {page}" for page in range(PAGES)]


def content(key: str, page_tokens: int = GEOMETRY.page_tokens) -> bytes:
    """The payload of a page, which differs between geometries."""
    return payload(f"{page_tokens} {key}")


class PausingMemory(Memory):
    def save(self, slot: int, page: memoryview) -> None:
        super().save(slot, page)
        print("fetching", flush=True)
        time.sleep(600)


def main() -> None:
    root, page_tokens, pages_per_shard, seed = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    geometry = replace(GEOMETRY, page_tokens=page_tokens)
    pages = store(root, geometry, pages_per_shard=pages_per_shard, lock_seconds=0.2)
    prompts = random.Random(seed)
    while True:
        prompt = keys(prompts.randrange(PROMPTS))
        memory = PausingMemory() if "pause" in sys.argv else Memory()
        cache = SharedCache(pages, memory)
        stored = cache.prefix_pages(prompt)
        fetched = cache.read(prompt[:stored], range(stored))
        for slot, arrived in enumerate(fetched):
            if arrived and memory.pages[slot] != content(prompt[slot], page_tokens):
                raise SystemExit(f"wrong page: {prompt[slot]}")
        missing = [slot for slot in range(PAGES) if slot >= stored or not fetched[slot]]
        memory.pages |= {slot: content(prompt[slot], page_tokens) for slot in missing}
        cache.write([prompt[slot] for slot in missing], missing)
        cache.close()
        print(sum(fetched), flush=True)


if __name__ == "__main__":
    main()
