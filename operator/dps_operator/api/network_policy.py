"""`spec.networkPolicy`: which peers may connect to the pods of a DPSRouter."""

from pydantic import Field

from dps_operator.api.types import APIObject, FreeObject


class NetworkPolicy(APIObject):
    """Network policies that allow only the gateway to connect to Redis, and only it and `monitoring` to the engines."""

    clients: list[FreeObject] = Field(
        default=[],
        max_length=32,
        description="Peers that may reach the gateway, as in a NetworkPolicy's `from`; all peers if empty.",
    )
    monitoring: list[FreeObject] = Field(
        default=[],
        max_length=32,
        description="Peers that may reach the gateway's admin port and the engines in addition to the gateway, as in a "
        "NetworkPolicy's `from`. Add Prometheus here.",
    )
