"""The data plane: `spec.gateway`, `routing`, `sessionStore`, `telemetry` and `networkPolicy`."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from dps_operator.api.pools import MIN_UP_TO_MAX, REPLICAS_OR_AUTOSCALING
from dps_operator.api.types import (
    APIObject,
    Name,
    PodTemplate,
    Resources,
    rules,
)

DEFAULT_GATEWAY_REPLICAS = 2


class GatewayAutoscaling(APIObject):
    """A HorizontalPodAutoscaler over CPU use."""

    model_config = ConfigDict(json_schema_extra=rules(MIN_UP_TO_MAX))

    min_replicas: int = Field(default=2, ge=1, le=1000, description="Fewest replicas.")
    max_replicas: int = Field(ge=1, le=1000, description="Most replicas.")
    target_cpu_percent: int = Field(
        default=70,
        ge=1,
        le=100,
        alias="targetCPUPercent",
        description="CPU use of one replica that is aimed at, in percent of its request.",
    )


class GatewayService(APIObject):
    """The Service that clients talk to."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Type of the Service."
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the Service.")
    annotations: dict[str, str] = Field(
        default={}, description="Annotations of the Service, such as a load balancer's."
    )


class GatewayAuth(APIObject):
    """API keys of the clients."""

    secret_name: Name = Field(description="Secret whose key `keys` holds the gateway's file of API keys.")


class GatewayIngress(APIObject):
    """An Ingress in front of the gateway."""

    class_name: Name | None = Field(
        default=None, description="Ingress class; the cluster's default when left out."
    )
    host: str = Field(min_length=1, max_length=253, description="Host name.")
    tls_secret_name: Name | None = Field(default=None, description="Secret with the host's certificate.")
    annotations: dict[str, str] = Field(
        default={}, description="Annotations, such as a controller's timeouts."
    )


class ParentRef(APIObject):
    """A Gateway that the route attaches to."""

    name: Name = Field(description="Name of the Gateway.")
    namespace: Name | None = Field(
        default=None, description="Its namespace; the DPSRouter's own when left out."
    )
    section_name: Name | None = Field(default=None, description="The listener; every listener when left out.")


Hostname = Annotated[str, Field(min_length=1, max_length=253)]


class GatewayHTTPRoute(APIObject):
    """An HTTPRoute of the Gateway API in front of the gateway."""

    parent_refs: list[ParentRef] = Field(
        min_length=1, max_length=16, description="The Gateways it attaches to."
    )
    hostnames: list[Hostname] = Field(
        default=[], max_length=16, description="Host names; every one when left out."
    )


class Gateway(APIObject):
    """The gateway's pods and how clients reach them."""

    model_config = ConfigDict(json_schema_extra=rules(REPLICAS_OR_AUTOSCALING))

    replicas: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description=f"Replicas; {DEFAULT_GATEWAY_REPLICAS} when neither this nor autoscaling is set.",
    )
    autoscaling: GatewayAutoscaling | None = Field(default=None, description="Replicas by CPU use.")
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image; the operator's own version when left out.",
    )
    resources: Resources = Field(default=Resources(), description="Resources of the gateway container.")
    service: GatewayService = Field(default=GatewayService(), description="The Service that clients talk to.")
    ingress: GatewayIngress | None = Field(default=None, description="An Ingress, when set.")
    http_route: GatewayHTTPRoute | None = Field(
        default=None, description="An HTTPRoute, when set. Needs the Gateway API's CRDs."
    )
    auth: GatewayAuth | None = Field(default=None, description="API keys of the clients; open when left out.")
    pod_template: PodTemplate = Field(default=PodTemplate(), description="Laid over the gateway's pods.")
