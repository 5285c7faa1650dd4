"""Conversations whose turns are measured and committed as in a gateway, without engines."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from multidict import CIMultiDict

from dps_gateway.engine.sglang import SGLang
from dps_gateway.engine.usage import Usage
from dps_gateway.pool import Pool
from dps_gateway.prompt.renderer import PromptRenderer
from dps_gateway.session.growth import History
from dps_gateway.session.identity import DEFAULT_SESSION_KEYS, Scope, parse_session_key
from dps_gateway.session.record import StoredResponse
from dps_gateway.session.store import Mirror, SessionStore
from dps_gateway.turn import MeasuredTurn, Turns
from dps_testkit.tokenizers import shared_tokenizer

SYSTEM = {"role": "system", "content": "You are a helpful assistant with a long list of instructions. " * 20}
KEYS = tuple(map(parse_session_key, DEFAULT_SESSION_KEYS))


def user(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}


def url(pool: Pool) -> str:
    """The base URL of the only replica of a pool."""
    return f"http://{pool}"


@cache
def renderer() -> PromptRenderer:
    """One renderer for all tests, because its tokenizer takes a moment to load."""
    return PromptRenderer(shared_tokenizer())


class ConversationClient:
    """Sends turns of conversations, with a session id or without one."""

    def __init__(self, session_id: str | None, tenant: str = "", turns: Turns | None = None) -> None:
        self._headers: Mapping[str, str] = CIMultiDict({"x-session-id": session_id} if session_id else {})
        self._scope = Scope.of("model", tenant)
        self.turns = turns or Turns(SessionStore(None, Mirror(1000), 3600), KEYS, SGLang.cache_fields)

    async def send(
        self, *messages: dict[str, Any], pool: Pool = Pool.GREEDY, replica: str | None = None, **fields: Any
    ) -> MeasuredTurn:
        """One turn, answered by a replica of `pool`; `fields` are the request's other fields."""
        turn = await self.measure(*messages, **fields)
        await self.turns.commit(turn, pool, replica or url(pool), "")
        return turn

    async def measure(self, *messages: dict[str, Any], **fields: Any) -> MeasuredTurn:
        """One turn up to its decision: no engine has begun to answer."""
        body: dict[str, Any] = {"messages": list(messages), **fields}
        return await self.turns.measure(self._scope, renderer().chat(body), self._headers, body)

    async def complete(self, prompt: str | list[int]) -> MeasuredTurn:
        """One turn of a raw completion, answered by the greedy pool."""
        turn = await self.turns.measure(self._scope, renderer().text(prompt), self._headers, {})
        await self.turns.commit(turn, Pool.GREEDY, url(Pool.GREEDY), "")
        return turn

    async def report(
        self,
        turn: MeasuredTurn,
        replica: str,
        prompt_tokens: int,
        cached_tokens: int | None = None,
        fetched_tokens: int | None = None,
    ) -> bool:
        """The usage that an engine reports. Returns whether the prompt has another length than expected."""
        return await self.turns.correct(turn, replica, Usage(prompt_tokens, 1, cached_tokens, fetched_tokens))

    async def respond(self, text: str, previous: StoredResponse | None = None) -> MeasuredTurn:
        """One turn of the Responses API, which continues a stored response, answered by the greedy pool."""
        body = {"input": text} | ({"previous_response_id": "resp"} if previous else {})
        prompt = renderer().responses(body)
        if previous is not None:
            prompt = prompt.continuing(previous.tokens)
        turn = await self.turns.measure(self._scope, prompt, self._headers, body, previous)
        await self.turns.commit(turn, Pool.GREEDY, url(Pool.GREEDY), "")
        return turn


def kind(turn: MeasuredTurn) -> History:
    """How the prompt of a turn relates to its session."""
    return turn.session.growth.history


def sharing(common: bool = True) -> ConversationClient:
    """A client of a gateway whose pools have a prefix cache in common or, if `common` is false, separate ones."""
    store = SessionStore(None, Mirror(1000), 3600)
    return ConversationClient(
        "named", turns=Turns(store, KEYS, SGLang.cache_fields, common_prefix_cache=common)
    )
