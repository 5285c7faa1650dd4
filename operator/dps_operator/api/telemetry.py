"""`spec.telemetry`: traces and metrics."""

from typing import Literal

from pydantic import Field

from dps_operator.api.types import APIObject


class ServiceMonitor(APIObject):
    """A ServiceMonitor of the Prometheus operator for the gateway and both pools."""

    interval: str = Field(default="30s", pattern=r"^[0-9]+(ms|s|m)$", description="Scrape interval.")
    labels: dict[str, str] = Field(default={}, description="Labels by which your Prometheus selects it.")


class Telemetry(APIObject):
    """Traces and metrics."""

    otlp_endpoint: str | None = Field(
        default=None,
        max_length=2048,
        pattern=r"^https?://[^/]+(/.*)?$",
        description="URL of an OTLP receiver for the traces of gateway and engines, without the /v1/traces of "
        "HTTP; no traces when left out.",
    )
    protocol: Literal["grpc", "http/protobuf"] = Field(
        default="grpc", description="Protocol of that receiver."
    )
    sample_ratio: float = Field(default=1, ge=0, le=1, description="Share of new traces that is kept.")
    service_monitor: ServiceMonitor | None = Field(
        default=None, description="A ServiceMonitor, when set. Needs the Prometheus operator's CRDs."
    )
