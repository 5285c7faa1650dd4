"""store_client.py write|read|fill|remove KEY SETTINGS: use a Mooncake store with the settings of SGLang's backend.

SETTINGS are the JSON object of --hicache-storage-backend-extra-config. A writer prints "written", and keeps its
segment, which contains the value, until its standard input is closed. A reader prints "same" if it has read the value
that a writer writes, otherwise "different". A filler stores values that Mooncake does not evict, until no page of an
engine fits into the segments of all clients. It prints "full", and removes them when its standard input is closed. The
action `remove` removes all values whose names contain `-KEY_`, and prints "removed".
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # type: ignore[import-not-found]

BUFFER_BYTES = 16 * 2**20
VALUE = bytes(range(256)) * 4096
SIZES = (2**20, 2**16, 2**12)
"""Of the values with which a store is filled. The smallest is less than a page of an engine."""
LEASE_SECONDS = 10.0
"""The master does not evict what was read in this time, by default."""
EVICTED_SECONDS = 1.0
"""When a value does not fit, the master evicts others in this time."""
RETRY_SECONDS = 0.1
NO_SPACE = -200


def fill(store: Any, name: str) -> Iterator[str]:
    """Store values until there is no space for the smallest, and yield their names."""
    kept = ReplicateConfig()
    kept.with_hard_pin = True
    number = 0
    time.sleep(LEASE_SECONDS)
    for size in SIZES:
        ends = time.monotonic() + EVICTED_SECONDS
        while time.monotonic() < ends:
            failed = store.put(f"{name}-{number}", VALUE[:size], kept)
            if failed == NO_SPACE:
                time.sleep(RETRY_SECONDS)
            elif failed:
                sys.exit(f"a value was not written: error {failed}")
            else:
                yield f"{name}-{number}"
                number += 1
                ends = time.monotonic() + EVICTED_SECONDS


def main(action: str, key: str, settings: str) -> None:
    """Run one action. Exits with an error message if the store cannot be used."""
    config = json.loads(settings)
    store = MooncakeDistributedStore()
    failed = store.setup(
        "127.0.0.1",
        config["metadata_server"],
        # The master would place pages in the segment of a client that has exited until it has not heard of it for ten
        # seconds, and engines could not write them.
        config["global_segment_size"] if action in ("write", "fill") else 0,
        BUFFER_BYTES,
        config["protocol"],
        config["device_name"],
        config["master_server_address"],
        None,
    )
    if failed:
        sys.exit(f"setup failed with error {failed}")
    name = f"{config['extra_backend_tag']}_{key}"
    if action == "write":
        if failed := store.put(name, VALUE):
            sys.exit(f"the value was not written: error {failed}")
        print("written", flush=True)
        sys.stdin.read()
    elif action == "fill":
        names = list(fill(store, name))
        print("full", flush=True)
        sys.stdin.read()
        store.batch_remove(names, True)
    elif action == "remove":
        store.remove_by_regex(f".*-{key}_.*", True)
        print("removed", flush=True)
    else:
        print("same" if store.get(name) == VALUE else "different", flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
