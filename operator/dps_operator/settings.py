"""Settings of the operator process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Default images and timing. Times are in seconds."""

    gateway_image: str = "dps-router/gateway:0.1.0"
    redis_image: str = "redis:7.4-alpine"
    plugin_image: str = "dps-router/operator:0.1.0"
    """Image from which the SGLang plugin of the common prefix cache is copied: the operator's own."""
    lab_image: str = "dps-router/lab:0.1.0"
    """Image of calibrations."""
    loader_image: str = "rclone/rclone:1.75.1"
    """Image of rclone, which downloads models from buckets."""
    pull_secrets: tuple[str, ...] = ()
    """Pull secrets of all pods of DPSRouters. A pull secret that does not exist in a namespace is ignored there."""
    hub_endpoint: str = ""
    """Base URL of the Hugging Face Hub or of a mirror, where configurations of models are read; empty for none."""
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; empty for all namespaces."""
    lease: str = ""
    """Lease of the replica that reconciles, as NAMESPACE/NAME; empty if there is one replica."""
    workers: int = 8
    """DPSRouters reconciled concurrently."""
    resync_seconds: float = 600
    """Interval of full listings, which recover events that a watch has missed."""
    request_timeout: float = 30
    """Timeout of one API server request."""
    stuck_after: float = 300
    """The liveness probe fails if a reconcile runs, or a listing is overdue, for longer than this."""
    health_port: int = 8080
