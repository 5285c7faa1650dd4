"""The data plane: an OpenAI-compatible gateway that routes each turn by Delta-Prefill Switching."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version() -> str:
    """The version of this distribution, or "unknown" if it runs from a source tree that is not installed."""
    try:
        return version("dps-router")
    except PackageNotFoundError:
        return "unknown"
