"""What the operator is told at its start, and not by a DPSRouter."""

from dataclasses import dataclass

DEFAULT_GATEWAY_IMAGE = "dps-router/gateway:0.1.0"
DEFAULT_REDIS_IMAGE = "redis:7.4-alpine"


@dataclass(frozen=True)
class Settings:
    """Defaults of what it makes, and its own rhythm. Times in seconds."""

    gateway_image: str = DEFAULT_GATEWAY_IMAGE
    redis_image: str = DEFAULT_REDIS_IMAGE
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; none means all of them."""
    workers: int = 8
    """DPSRouters reconciled at the same time."""
    resync_seconds: float = 600
    """Between two full listings, which mend whatever a watch has missed."""
    request_timeout: float = 30
    """For one call of the API server."""
    stuck_after: float = 300
    """A reconcile that runs, or a listing that is overdue, for so long makes the liveness probe fail."""
    health_port: int = 8080
