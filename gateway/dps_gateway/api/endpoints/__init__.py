"""The routed endpoints. To add one, write a module that defines a `Route` and list it in `ROUTES`."""

from typing import Final

from dps_gateway.api.endpoints import chat, completions, generate, messages, responses
from dps_gateway.api.endpoints.route import Route

ROUTES: Final[tuple[Route, ...]] = (
    chat.ROUTE,
    completions.ROUTE,
    messages.ROUTE,
    responses.ROUTE,
    generate.ROUTE,
)
