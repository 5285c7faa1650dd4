"""The results of calibrations. This module performs no I/O."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from dps_operator.api import RecommendedRouting, Spec
from dps_operator.observe import Finished, Pod

SHOWN_CHARACTERS: Final = 80
"""The maximum length of an unreadable result in a message; the rest is cut off."""


def newest_calibration(pods: Sequence[Pod], *, successful: bool = False) -> Finished | None:
    """The end of the calibration that finished last; None if none has finished. successful: leave out failed ones."""
    ended = [pod.finished for pod in pods if pod.finished is not None]
    ended = [each for each in ended if not successful or each.exit_code == 0]
    return max(ended, key=lambda each: each.time, default=None)


def recommendation(spec: Spec, pods: Sequence[Pod], status: Mapping[str, Any]) -> RecommendedRouting | None:
    """The result of the newest calibration that has found one, in the pods or else in the status.

    None if there is no such result, or if the spec has no calibration.
    """
    if spec.routing.calibration is None:
        return None
    known = _parsed(status.get("routing", {}).get("recommended"))
    found = newest_calibration(pods, successful=True)
    if found is None or (known is not None and found.time <= known.time):
        return known
    try:
        return calibration_result(found)
    except ResultError:
        return known


class ResultError(ValueError):
    """A calibration has succeeded without a readable result. The message says what is wrong with it."""


def calibration_result(found: Finished) -> RecommendedRouting:
    """The result of a calibration that has ended with status 0. Raises ResultError if it is not readable."""
    try:
        document = json.loads(found.message)
    except ValueError:
        raise ResultError(f"its termination message {_quoted(found.message)} is not JSON") from None
    if not isinstance(document, dict):
        raise ResultError(f"its termination message {_quoted(found.message)} is not a JSON object")
    try:
        return RecommendedRouting.model_validate({**document, "time": found.time})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ResultError(f"{field} in its termination message: {first['msg']}") from None


def _quoted(text: str) -> str:
    """A text in double quotes on one line, shortened."""
    return json.dumps(
        text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…", ensure_ascii=False
    )


def _parsed(document: Any) -> RecommendedRouting | None:
    try:
        return RecommendedRouting.model_validate(document) if document is not None else None
    except ValidationError:
        return None
