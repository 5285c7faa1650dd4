"""`spec.telemetry`: traces, metrics and the access log."""

from typing import Literal

from pydantic import Field

from dps_operator.api.types import APIObject


class ServiceMonitor(APIObject):
    """A Prometheus operator ServiceMonitor for the gateway, both pools and a managed Mooncake master."""

    interval: str = Field(default="30s", pattern=r"^[0-9]+(ms|s|m)$", description="Scrape interval.")
    labels: dict[str, str] = Field(
        default={}, description="Labels of the ServiceMonitor, by which Prometheus selects it."
    )


class Telemetry(APIObject):
    """Traces, metrics and the access log."""

    otlp_endpoint: str | None = Field(
        default=None,
        max_length=2048,
        pattern=r"^https?://[^/]+(/.*)?$",
        description="URL of the OTLP receiver for traces of the gateway and the engines; no traces if unset. With "
        "protocol http/protobuf, the path /v1/traces is appended to it.",
    )
    protocol: Literal["grpc", "http/protobuf"] = Field(
        default="grpc", description="Protocol of the OTLP receiver."
    )
    sample_ratio: float = Field(
        default=1,
        ge=0,
        le=1,
        description="Sampling ratio of the traces that start at the gateway; a request with a trace context keeps its "
        "caller's decision.",
    )
    access_log: bool = Field(
        default=False,
        description="Whether the gateways write one line of JSON per request, without prompts and keys, to their "
        "standard output. A change restarts the gateways.",
    )
    service_monitor: ServiceMonitor | None = Field(
        default=None, description="Create a ServiceMonitor if set. Requires the Prometheus operator's CRDs."
    )
