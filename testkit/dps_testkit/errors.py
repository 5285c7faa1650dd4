"""Errors that tests expect from the tools they run."""


class RefusedError(Exception):
    """A command failed or timed out, no cluster is available, or the test must not use the cluster.

    The message is the error output of kubectl or helm, or explains what to change.
    """
