"""Finding the engine that holds a stored response of the Responses API, and recording it."""

from dps_gateway.api.call import Call
from dps_gateway.api.dispatch import Dispatch
from dps_gateway.api.errors import ResponseNotFound
from dps_gateway.engine.usage import Usage
from dps_gateway.session.record import StoredResponse
from dps_gateway.upstream.admission import PoolEmpty


async def find_stored_response(call: Call, response_id: str) -> StoredResponse:
    """The engine that holds a response of the call's tenant.

    Raises ResponseNotFound if the response is unknown or the engine has been removed, and PoolEmpty if the engine is
    not ready.
    """
    runtime = call.runtime
    stored = await runtime.turns.store.recall(runtime.scope(call.tenant), response_id)
    if stored is None:
        raise ResponseNotFound(f"Response with id '{response_id}' not found.")
    replica = runtime.pools[stored.pool].replicas.get(stored.url)
    if replica is None:
        raise ResponseNotFound(
            f"The engine that held response '{response_id}' is gone: send the whole conversation in input."
        )
    if not replica.ready:
        raise PoolEmpty(f"the engine that holds response '{response_id}' is not ready")
    return stored


async def remember(call: Call, dispatch: Dispatch, usage: Usage) -> None:
    """Record which engine holds the response to this call, and how long the conversation is now."""
    if usage.response_id is None:
        return
    turn, stored = call.turn, StoredResponse(dispatch.pool.name, dispatch.replica.url)
    if turn is not None and usage.prompt_tokens:
        # The next prompt contains the token that ends a complete answer, so it must not be counted twice.
        ending = 1 if usage.finish_reason == "completed" else 0
        tokens = usage.prompt_tokens + usage.completion_tokens - ending
        stored = StoredResponse(stored.pool, stored.url, turn.session.id.text, turn.prompt.digest, tokens)
    scope = call.runtime.scope(call.tenant)
    await call.runtime.turns.store.remember(scope, usage.response_id, stored)
