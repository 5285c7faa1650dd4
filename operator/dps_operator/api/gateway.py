"""`spec.gateway`: the gateway pods and how clients reach them."""

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
    """A HorizontalPodAutoscaler driven by CPU utilization."""

    model_config = ConfigDict(json_schema_extra=rules(MIN_UP_TO_MAX))

    min_replicas: int = Field(default=2, ge=1, le=1000, description="Minimum number of replicas.")
    max_replicas: int = Field(ge=1, le=1000, description="Maximum number of replicas.")
    target_cpu_percent: int = Field(
        default=70,
        ge=1,
        le=100,
        alias="targetCPUPercent",
        description="Target CPU utilization, averaged over the replicas, in percent of their CPU request.",
    )


class GatewayService(APIObject):
    """The Service for clients."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Type of the Service."
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the Service.")
    annotations: dict[str, str] = Field(
        default={}, description="Annotations of the Service, for example for a load balancer."
    )


class GatewayAuth(APIObject):
    """Client authentication by API key."""

    secret_name: Name = Field(description="Secret with the gateway's API key file under the key `keys`.")
    isolate_cache: bool = Field(
        default=True,
        description="Whether each tenant has its own prefix cache in the engines. If false, tenants share cached "
        "prefixes, and a tenant can infer from response times which prompts others have sent.",
    )


class GatewayIngress(APIObject):
    """An Ingress in front of the gateway."""

    class_name: Name | None = Field(
        default=None, description="Ingress class; the cluster's default if unset."
    )
    host: str = Field(min_length=1, max_length=253, description="Host name.")
    tls_secret_name: Name | None = Field(
        default=None, description="Secret with the TLS certificate of the host; no TLS if unset."
    )
    annotations: dict[str, str] = Field(
        default={}, description="Annotations of the Ingress, for example the controller's timeouts."
    )


class ParentRef(APIObject):
    """A Gateway to which the route attaches."""

    name: Name = Field(description="Name of the Gateway.")
    namespace: Name | None = Field(
        default=None, description="Namespace of the Gateway; the DPSRouter's if unset."
    )
    section_name: Name | None = Field(
        default=None, description="Listener of the Gateway; all listeners if unset."
    )


Hostname = Annotated[str, Field(min_length=1, max_length=253)]


class GatewayHTTPRoute(APIObject):
    """A Gateway API HTTPRoute in front of the gateway."""

    parent_refs: list[ParentRef] = Field(
        min_length=1, max_length=16, description="Gateways to which the route attaches."
    )
    hostnames: list[Hostname] = Field(
        default=[], max_length=16, description="Host names; all host names if empty."
    )


class Gateway(APIObject):
    """The gateway pods and how clients reach them."""

    model_config = ConfigDict(json_schema_extra=rules(REPLICAS_OR_AUTOSCALING))

    replicas: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description=f"Number of replicas; {DEFAULT_GATEWAY_REPLICAS} if neither replicas nor autoscaling is set.",
    )
    autoscaling: GatewayAutoscaling | None = Field(
        default=None, description="Scale replicas by CPU utilization."
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image; if unset, the operator's default (gatewayImage in the chart's values).",
    )
    resources: Resources = Field(default=Resources(), description="Resources of the gateway container.")
    service: GatewayService = Field(default=GatewayService(), description="The Service for clients.")
    ingress: GatewayIngress | None = Field(default=None, description="Create an Ingress if set.")
    http_route: GatewayHTTPRoute | None = Field(
        default=None, description="Create an HTTPRoute if set. Requires the Gateway API CRDs."
    )
    auth: GatewayAuth | None = Field(
        default=None, description="Client authentication; if unset, the gateway accepts every client."
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(), description="Pod template to merge into the gateway's generated one."
    )
