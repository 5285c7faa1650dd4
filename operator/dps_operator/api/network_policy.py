"""`spec.networkPolicy`: which peers may connect to the pods of a DPSRouter."""

from pydantic import Field

from dps_operator.api.types import APIObject, FreeObject


class NetworkPolicy(APIObject):
    """Network policies by which only the gateway can connect to the engines and Redis."""

    clients: list[FreeObject] = Field(
        default=[],
        max_length=32,
        description="Peers that may reach the gateway, as in a NetworkPolicy's `from`; all peers if empty.",
    )
    monitoring: list[FreeObject] = Field(
        default=[],
        max_length=32,
        description="Peers, such as Prometheus, that may connect to the gateway's admin port and the engines; only the "
        "gateway may if empty.",
    )
