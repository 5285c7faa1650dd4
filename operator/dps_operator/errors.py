"""The operator's exceptions."""

from dps_engines.launch import EngineError

TRANSIENT_STATUSES = (0, 409, 429, 500, 502, 503, 504)
"""HTTP statuses after which a retry may succeed; 0 means that there was no response."""


SpecError = EngineError
"""The spec is invalid; the message says what to change. Not retried until the spec changes."""


class GatewaysUnreachableError(Exception):
    """The metrics of a DPSRouter's gateways cannot be read; the message says why."""


class UnreadableMetricsError(Exception):
    """The metrics of a pod are not what they should be; the message says why."""


class LeadershipLostError(Exception):
    """This replica no longer holds the Lease, and must stop writing."""


class ClusterError(Exception):
    """The API server returned an error, or did not respond.

    status: HTTP status; 0 if there was no response. retry_after: delay in seconds that the server requested.
    """

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def transient(self) -> bool:
        """Whether the error is transient and the call should be retried."""
        return self.status in TRANSIENT_STATUSES


class RejectedError(ClusterError):
    """The API server rejected the object (400, 422): a field that is copied from the spec unchecked is invalid."""


class SchemaError(RejectedError):
    """The object has a field that its kind does not have, or a value of another type than the field's."""


class NotInstalledError(ClusterError):
    """The API server does not serve the kind, because its CRD is not installed."""


class NotFoundError(ClusterError):
    """The object does not exist."""


class AlreadyExistsError(ClusterError):
    """An object of this name already exists."""

    @property
    def transient(self) -> bool:
        """Never transient: a retry would fail in the same way."""
        return False


class TimedOutError(ClusterError):
    """The API server did not respond in time."""
