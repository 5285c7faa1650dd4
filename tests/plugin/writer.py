"""writer.py ROOT PAYLOAD_BYTES PAGES_PER_SHARD FIRST COUNT [slow | small-files]: a process that stores pages.

slow: writes a few bytes at a time, so that a test can kill it in the middle of a page.
small-files: the file system refuses files of more than half a page.
"""

import os
import resource
import sys
import time
from pathlib import Path

from tests.plugin.pages import of_size, payload, store

write = os.write


def slow_write(file: int, data: object) -> int:
    time.sleep(0.001)
    assert isinstance(data, memoryview)
    return write(file, data[:256])


def main() -> None:
    root, size, pages_per_shard, first, count = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    if "slow" in sys.argv:
        setattr(os, "write", slow_write)  # noqa: B010, mypy refuses an assignment
    if "small-files" in sys.argv:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    pages = store(root, of_size(size), pages_per_shard=pages_per_shard)
    for number in range(first, first + count):
        print(pages.put(str(number), payload(str(number), size)).value, flush=True)


if __name__ == "__main__":
    main()
