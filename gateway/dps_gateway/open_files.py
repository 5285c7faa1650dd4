"""The limit on open files."""

import resource


def raise_file_limit() -> None:
    """Raise this process's limit on open files to the maximum that the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
