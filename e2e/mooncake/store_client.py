"""store_client.py write|read KEY SETTINGS: write or read one value in a Mooncake store, as SGLang's backend does.

SETTINGS are the JSON object of --hicache-storage-backend-extra-config. A writer prints "written", and keeps its
segment, which contains the value, until its standard input is closed. A reader prints "same" if it has read the value
that a writer writes, otherwise "different".
"""

import json
import sys

from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

BUFFER_BYTES = 16 * 2**20
VALUE = bytes(range(256)) * 4096


def main(action: str, key: str, settings: str) -> None:
    """Run one action. Exits with an error message if the store cannot be used."""
    config = json.loads(settings)
    store = MooncakeDistributedStore()
    failed = store.setup(
        "127.0.0.1",
        config["metadata_server"],
        config["global_segment_size"],
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
    else:
        print("same" if store.get(name) == VALUE else "different", flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
