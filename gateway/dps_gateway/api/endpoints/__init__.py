"""The routed endpoints. To add one, write a module with a subclass of `Endpoint` and list its instance here."""

from typing import Final

from dps_gateway.api.endpoints.base import Endpoint
from dps_gateway.api.endpoints.generate import GENERATE
from dps_gateway.api.endpoints.messages import MESSAGES
from dps_gateway.api.endpoints.openai import CHAT, COMPLETIONS
from dps_gateway.api.endpoints.responses import RESPONSES
from dps_gateway.api.errors import OpenAIErrors

ENDPOINTS: Final[tuple[Endpoint, ...]] = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE)

_OPENAI_ERRORS: Final = OpenAIErrors()


def errors_of(path: str) -> OpenAIErrors:
    """The form of the errors of an endpoint, which is also that of the paths below it."""
    return next((each for each in (MESSAGES, RESPONSES) if path.startswith(each.path)), _OPENAI_ERRORS)
