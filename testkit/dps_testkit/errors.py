"""Errors that tests expect from the tools they run."""


class RefusedError(Exception):
    """kubectl or helm failed; the message is its error output."""
