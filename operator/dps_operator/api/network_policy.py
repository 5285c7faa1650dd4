"""`spec.networkPolicy`: which peers may connect to the pods of a DPSRouter."""

from pydantic import Field

from dps_operator.api.types import APIObject, FreeObject


class NetworkPolicy(APIObject):
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
