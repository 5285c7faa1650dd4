"""The identifier of a shared directory, which shows whether engines have mounted the same one."""

import contextlib
import errno
import os
import re
import stat
import uuid
from pathlib import Path

ID_NAME = "directory-id"
ID_BYTES = 32
_ID = re.compile(rf"[0-9a-f]{{{ID_BYTES}}}")


def directory_id(directory: Path) -> str:
    """The identifier, which the first engine creates. Raises OSError if it can be neither read nor written.

    If two engines create it at the same time, one of them may return an identifier that the other has replaced. It is
    therefore read again from time to time.
    """
    path = directory / ID_NAME
    if (found := _read(path)) is None:
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f"{ID_NAME}.{uuid.uuid4().hex}"
        try:
            new.write_text(uuid.uuid4().hex)
            os.replace(new, path)
        finally:
            with contextlib.suppress(OSError):
                new.unlink()
        found = _read(path)
    if found is None:
        raise OSError(f"{path} contains no valid identifier; another engine may have changed it")
    return found


def _read(path: Path) -> str | None:
    """The identifier in a file; None if it does not exist, is not a regular file, or contains no identifier."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = os.read(descriptor, ID_BYTES + 1).decode(errors="replace")
    finally:
        os.close(descriptor)
    return text if _ID.fullmatch(text) else None
