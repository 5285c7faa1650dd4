"""What can go wrong, and what the operator does about it."""

TRANSIENT_STATUSES = (0, 409, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same call may well succeed; 0 is no answer at all."""


class OperatorError(Exception):
    """Everything that the operator raises on purpose."""


class SpecError(OperatorError):
    """The spec asks for what cannot be; the message says what to change. Not retried: the next edit is."""


class ClusterError(OperatorError):
    """The API server answered with an error, or not at all.

    `status` is the HTTP status, 0 where none came; `retry_after` the seconds it asked to wait, if it did.
    """

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def transient(self) -> bool:
        """Whether it is the server's bad moment, and not about what was asked."""
        return self.status in TRANSIENT_STATUSES


class RejectedError(ClusterError):
    """The API server refused the object itself (400, 422): what the spec passed through is not valid."""


class NotInstalledError(ClusterError):
    """The API server does not know the kind: its CRDs are not installed."""


class NotFoundError(ClusterError):
    """There is no such object."""


class AlreadyExistsError(ClusterError):
    """There is such an object already."""

    @property
    def transient(self) -> bool:
        """Never: it will be there the next time as well."""
        return False


class TimedOutError(ClusterError):
    """The API server did not answer in time."""
