"""The whole `spec` of a DPSRouter."""

from typing import Any

from pydantic import Field, ValidationError

from dps_operator.api.gateway import Gateway
from dps_operator.api.model import Engine, NodePool, ServedModel
from dps_operator.api.network_policy import NetworkPolicy
from dps_operator.api.pools import Pools
from dps_operator.api.routing import Routing
from dps_operator.api.session_store import SessionStore
from dps_operator.api.telemetry import Telemetry
from dps_operator.api.types import APIObject
from dps_operator.errors import SpecError

LONGEST_NAME = 50
"""Longest name of a DPSRouter: `<name>-speculative` must be a Service's name, with room for suffixes."""


class Spec(APIObject):
    """The deployment that is wanted."""

    model: ServedModel = Field(description="The target model.")
    engine: Engine = Field(default=Engine(), description="The inference engine of both pools.")
    node_pool: NodePool = Field(default=NodePool(), description="Which nodes the engines run on.")
    pools: Pools = Field(description="The two pools that turns are routed to.")
    gateway: Gateway = Field(default=Gateway(), description="The gateway's pods and how clients reach them.")
    routing: Routing = Field(default=Routing(), description="Which turn goes to which pool.")
    session_store: SessionStore = Field(default=SessionStore(), description="Where sessions are kept.")
    telemetry: Telemetry = Field(default=Telemetry(), description="Traces and metrics.")
    network_policy: NetworkPolicy | None = Field(
        default=None, description="Network policies, when set; {} closes the engines and Redis."
    )


def parse(spec: Any) -> Spec:
    """The model of a raw `spec`; SpecError names the first field that is wrong.

    The API server has checked it against the schema already; this catches an operator older than its CRD.
    """
    try:
        return Spec.model_validate(spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SpecError(f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
