"""`spec.gateway`: the gateway pods and how clients reach them."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from dps_operator.api.pools import MIN_UP_TO_MAX, REPLICAS_OR_AUTOSCALING
from dps_operator.api.types import (
    APIObject,
    FreeObject,
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


AddressRange = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=64)]


class GatewayService(APIObject):
    """The Service for clients."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.type == 'LoadBalancer' || (!has(self.loadBalancerClass) && !has(self.loadBalancerSourceRanges))",
                "gateway.service.loadBalancerClass and loadBalancerSourceRanges require the type LoadBalancer",
            ),
            (
                "self.type != 'ClusterIP' || !has(self.externalTrafficPolicy)",
                "gateway.service.externalTrafficPolicy requires the type LoadBalancer or NodePort",
            ),
            (
                "self.type != 'LoadBalancer' || oldSelf.type != 'LoadBalancer' ||"
                " has(self.loadBalancerClass) == has(oldSelf.loadBalancerClass) &&"
                " (!has(self.loadBalancerClass) || self.loadBalancerClass == oldSelf.loadBalancerClass)",
                "gateway.service.loadBalancerClass cannot be changed; set the type to ClusterIP first",
            ),
        )
    )

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Type of the Service."
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the Service.")
    annotations: dict[str, str] = Field(
        default={}, description="Annotations of the Service, for example for a load balancer."
    )
    load_balancer_class: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Class of the load balancer, such as service.k8s.aws/nlb; the cluster's default if unset. It "
        "cannot be changed while the type is LoadBalancer.",
    )
    load_balancer_source_ranges: list[AddressRange] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Ranges of client addresses, such as 203.0.113.0/24, from which the load balancer accepts "
        "connections, if the cloud supports this; from all if unset.",
    )
    external_traffic_policy: Literal["Cluster", "Local"] | None = Field(
        default=None,
        description="Whether nodes forward external connections to the gateways of all nodes (Cluster) or only to "
        "their own (Local), so that the gateway receives the client's address. Cluster if unset.",
    )


class GatewayLimits(APIObject):
    """`limits` of the gateway's configuration. The gateway's default applies to a field that is unset."""

    max_body_bytes: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Maximum size of a request body in bytes."
    )
    max_buffered_bytes: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Maximum total size of the bodies of all requests in progress in one gateway pod, in bytes.",
    )
    min_body_bytes_per_second: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="Minimum average rate, in bytes per second, at which a request body must arrive after a grace "
        "period of timeouts.headerSeconds; 0 for no minimum.",
    )
    max_in_flight_per_replica: int | None = Field(
        default=None,
        ge=1,
        le=100000,
        description="Maximum number of requests in flight from one gateway pod to one engine; if the engine reports a "
        "lower limit on running requests, that limit applies.",
    )
    max_queued: int | None = Field(
        default=None,
        ge=0,
        le=1000000,
        description="Maximum number of requests that wait in one gateway pod for a free engine of either pool.",
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        le=1000000,
        description="Maximum number of client connections to one gateway pod; at least the number of workers.",
    )


def _seconds(description: str) -> Any:
    return Field(default=None, ge=0, le=86400, description=f"{description}, in seconds; more than 0.")


POSITIVE = (
    "headerSeconds",
    "bodySeconds",
    "keepAliveSeconds",
    "connectSeconds",
    "firstByteSeconds",
    "idleSeconds",
    "totalSeconds",
    "queueSeconds",
    "wakeSeconds",
    "silentSeconds",
    "healthIntervalSeconds",
)
"""Timeouts that must not be 0. A fractional `minimum` does not express this, because the API server rounds it down if
the value is a whole number."""


class GatewayTimeouts(APIObject):
    """`timeouts` of the gateway's configuration. The gateway's default applies to a field that is unset."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                " && ".join(f"(!has(self.{name}) || self.{name} > 0.0)" for name in POSITIVE),
                f"timeouts.{', timeouts.'.join(POSITIVE[:-1])} and timeouts.{POSITIVE[-1]} must be greater than 0",
            )
        )
    )

    header_seconds: float | None = _seconds("Time limit for the arrival of a request's headers")
    body_seconds: float | None = _seconds("Time limit for the arrival of a request's body")
    keep_alive_seconds: float | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="Time for which a client's connection is kept open between requests, in seconds; more than 0, and "
        "more than the load balancer's idle timeout.",
    )
    connect_seconds: float | None = _seconds("Time limit for connecting to an engine")
    first_byte_seconds: float | None = _seconds("Time limit for the first byte of an engine's answer")
    idle_seconds: float | None = _seconds("Time limit between two parts of an engine's answer")
    total_seconds: float | None = _seconds("Time limit for a request")
    queue_seconds: float | None = _seconds("Time limit for waiting in the queue, which both pools share")
    wake_seconds: float | None = _seconds(
        "Time limit for waiting while no engine is ready, for example because both pools are scaled to zero; by "
        "default 600 if a pool has autoscaling.minReplicas 0, and otherwise requests are answered with 503 immediately"
    )
    silent_seconds: float | None = _seconds(
        "Time without a token after which an engine's scheduler is checked"
    )
    health_interval_seconds: float | None = _seconds("Time between two health checks of an engine")
    slow_start_seconds: float | None = Field(
        default=None,
        ge=0,
        le=86400,
        description="Duration, in seconds, of the slow start in which the share of requests of an engine that joins a "
        "pool or returns to service grows from a tenth to that of the other engines; 0 to disable.",
    )
    drain_delay_seconds: float | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="Time between reporting not-ready and refusing connections when a gateway stops, in seconds.",
    )


class GatewayAuth(APIObject):
    """Client authentication by API key."""

    secret_name: Name = Field(description="Secret with the gateway's API key file under the key `keys`.")
    isolate_cache: bool = Field(
        default=True,
        description="Whether each tenant has its own prefix cache in the engines. If false, tenants share cached "
        "prefixes, and a tenant can infer from response times which prompts others have sent.",
    )


class GatewayTLS(APIObject):
    """TLS on the port for clients."""

    secret_name: Name = Field(
        description="Secret of the type kubernetes.io/tls with the certificate. After a change of the Secret, new "
        "connections use the new certificate."
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


Weight = Annotated[int, Field(ge=0, le=1_000_000)]


class BackendRef(APIObject):
    """A Service that receives a part of the requests."""

    name: Name = Field(description="Name of the Service.")
    namespace: Name | None = Field(
        default=None,
        description="Namespace of the Service; the DPSRouter's if unset. Another one requires a ReferenceGrant in it.",
    )
    port: int = Field(ge=1, le=65535, description="Port of the Service.")
    weight: Weight = Field(
        default=1, description="Its part of the requests, relative to the sum of all weights."
    )


Hostname = Annotated[str, Field(min_length=1, max_length=253)]


class GatewayHTTPRoute(APIObject):
    """A Gateway API HTTPRoute in front of the gateway."""

    parent_refs: list[ParentRef] = Field(
        min_length=1, max_length=16, description="Gateways to which the route attaches."
    )
    hostnames: list[Hostname] = Field(
        default=[],
        max_length=16,
        description="Host names; all host names if empty. status.url has the first one, with https if the section name "
        "of the first parent contains https.",
    )
    request_timeout: str = Field(
        default="0s",
        pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$",
        description="Time limit for a whole request, streamed answers included, for example 10m; 0s for none.",
    )
    filters: list[FreeObject] = Field(
        default=[],
        max_length=16,
        description="Filters of the route's rule, as in an HTTPRoute: requestHeaderModifier, requestMirror, …",
    )
    weight: Weight = Field(
        default=1, description="The gateway's part of the requests, relative to the sum of all weights."
    )
    backend_refs: list[BackendRef] = Field(
        default=[],
        max_length=15,
        description="Further Services that receive requests, for example the gateway of another DPSRouter.",
    )


CONNECTIONS_OF_WORKERS = (
    "!has(self.limits) || !has(self.limits.maxConnections) || !has(self.workers)"
    " || self.limits.maxConnections >= self.workers",
    "gateway.limits.maxConnections must be at least gateway.workers, which divide it",
)


class Gateway(APIObject):
    """The gateway pods and how clients reach them."""

    model_config = ConfigDict(json_schema_extra=rules(REPLICAS_OR_AUTOSCALING, CONNECTIONS_OF_WORKERS))

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
    model_aliases: list[Annotated[str, Field(min_length=1, max_length=512)]] = Field(
        default=[],
        max_length=64,
        description="Other names of the model that clients may send, such as gpt-4o.",
    )
    strict_model: bool = Field(
        default=True,
        description="Whether requests for other models are refused with 404; otherwise the engines decide, and SGLang "
        "accepts every name.",
    )
    auth: GatewayAuth | None = Field(
        default=None, description="Client authentication; if unset, the gateway accepts every client."
    )
    tls: GatewayTLS | None = Field(
        default=None, description="TLS on the port for clients; if unset, the gateway serves HTTP."
    )
    limits: GatewayLimits = Field(default=GatewayLimits(), description="Limits on requests and queues.")
    timeouts: GatewayTimeouts = Field(default=GatewayTimeouts(), description="Time limits for requests.")
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes per gateway pod, each of which uses at most about one CPU core. They share the limits.",
    )
    drain_seconds: int = Field(
        default=300,
        ge=1,
        le=86400,
        description="Time that requests in flight have to finish when a gateway pod is deleted, in seconds.",
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(), description="Pod template to merge into the gateway's generated one."
    )
