"""The data plane: `spec.gateway`, `routing`, `sessionStore`, `telemetry` and `networkPolicy`."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from dps_operator.api.pools import MIN_UP_TO_MAX, REPLICAS_OR_AUTOSCALING
from dps_operator.api.types import (
    FreeObject,
    Model,
    Name,
    PodTemplate,
    Quantity,
    Resources,
    SecretKeyRef,
    rules,
)

DEFAULT_GATEWAY_REPLICAS = 2

Policy = Literal["DeltaPrefill", "TotalLength", "AlwaysSpeculative", "AlwaysGreedy", "Random"]


class GatewayAutoscaling(Model):
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


class GatewayService(Model):
    """The Service that clients talk to."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Type of the Service."
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the Service.")
    annotations: dict[str, str] = Field(
        default={}, description="Annotations of the Service, such as a load balancer's."
    )


class GatewayAuth(Model):
    """API keys of the clients."""

    secret_name: Name = Field(description="Secret whose key `keys` holds the gateway's file of API keys.")


class GatewayIngress(Model):
    """An Ingress in front of the gateway."""

    class_name: Name | None = Field(
        default=None, description="Ingress class; the cluster's default when left out."
    )
    host: str = Field(min_length=1, max_length=253, description="Host name.")
    tls_secret_name: Name | None = Field(default=None, description="Secret with the host's certificate.")
    annotations: dict[str, str] = Field(
        default={}, description="Annotations, such as a controller's timeouts."
    )


class ParentRef(Model):
    """A Gateway that the route attaches to."""

    name: Name = Field(description="Name of the Gateway.")
    namespace: Name | None = Field(
        default=None, description="Its namespace; the DPSRouter's own when left out."
    )
    section_name: Name | None = Field(default=None, description="The listener; every listener when left out.")


Hostname = Annotated[str, Field(min_length=1, max_length=253)]


class GatewayHTTPRoute(Model):
    """An HTTPRoute of the Gateway API in front of the gateway."""

    parent_refs: list[ParentRef] = Field(
        min_length=1, max_length=16, description="The Gateways it attaches to."
    )
    hostnames: list[Hostname] = Field(
        default=[], max_length=16, description="Host names; every one when left out."
    )


class Gateway(Model):
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


SessionKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=r"^(header:[A-Za-z0-9_-]+|body:[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)$",
    ),
]


class Routing(Model):
    """Which turn goes to which pool. A change reaches running gateways without a restart."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.sessionKeys) || self.sessionKeys.all(key, !(key.lowerAscii() in"
                " ['header:authorization', 'header:proxy-authorization', 'header:cookie',"
                " 'header:x-api-key']))",
                "many sessions share a credential, which cannot identify one; take it off sessionKeys",
            )
        )
    )

    policy: Policy = Field(
        default="DeltaPrefill",
        description=(
            "DeltaPrefill: speculative when the prompt grew by at most thresholdTokens. TotalLength: when it "
            "is at most that long. AlwaysSpeculative, AlwaysGreedy, Random: for comparison."
        ),
    )
    threshold_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=128,
        description=(
            "The threshold in tokens. 0 is all greedy; null has no bound and is all speculative: set it by "
            "server-side apply, as plain kubectl apply drops nulls, or choose policy AlwaysSpeculative."
        ),
    )
    session_ttl_seconds: int = Field(
        default=3600,
        ge=1,
        le=2_592_000,
        alias="sessionTTLSeconds",
        description="Seconds after its last turn that a session is forgotten.",
    )
    session_keys: list[SessionKey] = Field(
        default=[],
        max_length=32,
        description=(
            "Where a request's session id is looked for, in order, as `header:NAME` or `body:FIELD`; the "
            "gateway's own list when empty."
        ),
    )


class ManagedStore(Model):
    """A Redis that the operator runs."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "quantity(string(self.size)).compareTo(quantity(string(oldSelf.size))) == 0",
                "sessionStore.managed.size cannot be changed; make a new DPSRouter, or use urlSecretRef",
            ),
            (
                "has(self.storageClassName) == has(oldSelf.storageClassName) &&"
                " (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
                "sessionStore.managed.storageClassName cannot be changed; make a new DPSRouter",
            ),
        )
    )

    size: Quantity = Field(default="1Gi", description="Size of its volume. Cannot be changed.")
    storage_class_name: Name | None = Field(
        default=None,
        description="Storage class of its volume; the cluster's default when left out. Cannot be changed.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image of Redis or Valkey; the operator's default when left out.",
    )


class SessionStore(Model):
    """Where sessions are kept: a managed Redis unless urlSecretRef is set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!(has(self.managed) && has(self.urlSecretRef))",
                "set either sessionStore.managed or sessionStore.urlSecretRef, not both",
            )
        )
    )

    managed: ManagedStore | None = Field(default=None, description="A Redis that the operator runs.")
    url_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret key holding the URL of a Redis of yours: redis://, rediss://, …"
    )


class ServiceMonitor(Model):
    """A ServiceMonitor of the Prometheus operator for the gateway and both pools."""

    interval: str = Field(default="30s", pattern=r"^[0-9]+(ms|s|m)$", description="Scrape interval.")
    labels: dict[str, str] = Field(default={}, description="Labels by which your Prometheus selects it.")


class Telemetry(Model):
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


class NetworkPolicy(Model):
    """Network policies that close the engines and Redis to all but the gateway."""

    clients: list[FreeObject] = Field(
        default=[],
        max_length=32,
        description="Peers that may reach the gateway, as in a NetworkPolicy's `from`; everyone when empty.",
    )
    monitoring: list[FreeObject] = Field(
        default=[],
        max_length=32,
        description="Peers that may scrape the gateway's admin port and the engines; nobody when empty.",
    )
