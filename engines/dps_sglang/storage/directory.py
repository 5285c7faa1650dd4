"""The identifier of a shared directory, which shows whether engines have mounted the same one."""

import os
import re
import uuid
from pathlib import Path

ID_NAME = "directory-id"
_ID = re.compile(r"[0-9a-f]{32}")


def directory_id(directory: Path) -> str:
    """The identifier, which the first engine creates. Raises OSError if it can be neither read nor written.

    If two engines create it at the same time, one of them may return an identifier that the other has replaced. It is
    therefore read again from time to time.
    """
    path = directory / ID_NAME
    if (found := _read(path)) is None:
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f"{ID_NAME}.{uuid.uuid4().hex}"
        new.write_text(uuid.uuid4().hex)
        os.replace(new, path)
        found = _read(path)
    if found is None:
        raise OSError(f"{path} was changed at the same time")
    return found


def _read(path: Path) -> str | None:
    """The identifier in a file; None if the file does not exist or has another content."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    return text if _ID.fullmatch(text) else None
