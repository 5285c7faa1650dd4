"""Records of decisions as the gateway keeps them in memory."""

from dataclasses import replace
from typing import Any

from dps_gateway.api.decisions import DecisionRecord
from dps_gateway.api.outcome import Outcome
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.session.growth import History

_RECORD = DecisionRecord(
    time=0.0,
    request_id="r",
    tenant="",
    route="/v1/chat/completions",
    session="dps-1",
    client_session=None,
    turn=1,
    history=History.NEW,
    changed=None,
    prompt_tokens=30,
    delta_tokens=30,
    decision=Decision(Pool.GREEDY, Reason.OVER_THRESHOLD),
    policy_input=None,
    attempt=(Pool.GREEDY, Reason.OVER_THRESHOLD),
    replica=None,
    queue_seconds=None,
    first_token_seconds=None,
    total_seconds=1.0,
    usage=None,
    common_prefix_cache=False,
    outcome=Outcome.COMPLETE,
    status=200,
    trace=0,
)


def decision_record(**fields: Any) -> DecisionRecord:
    """A first turn that a greedy engine answered, with these fields instead of its own."""
    return replace(_RECORD, **fields)
