"""writer.py ROOT PAYLOAD_BYTES PAGES_PER_SHARD FIRST COUNT [hold | small-files]: a process that stores pages.

hold: in the middle of the first page, wait for a line on the standard input.
small-files: the file system refuses files of more than half a page.
"""

import os
import resource
import sys
from pathlib import Path

from dps_sglang.storage.page import HEADER_BYTES
from tests.plugin.pages import of_size, payload, store

write = os.write


def hold(file: int, data: object) -> int:
    """Write part of a payload, and the rest once a line was read."""
    assert isinstance(data, memoryview)
    if data.nbytes <= HEADER_BYTES:
        return write(file, data)
    setattr(os, "write", write)  # noqa: B010, mypy refuses an assignment
    written = write(file, data[:256])
    sys.stdin.readline()
    return written


def main() -> None:
    root, size, pages_per_shard, first, count = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    if "hold" in sys.argv:
        setattr(os, "write", hold)  # noqa: B010, mypy refuses an assignment
    if "small-files" in sys.argv:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    pages = store(root, of_size(size), pages_per_shard=pages_per_shard)
    for number in range(first, first + count):
        print(pages.put(str(number), payload(str(number), size)).value, flush=True)


if __name__ == "__main__":
    main()
