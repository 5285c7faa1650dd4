"""Concurrent sessions that change pools on every turn, and a comparison with sessions that never moved."""

from collections.abc import Sequence
from itertools import product

import aiohttp

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from e2e.prefix_cache.sessions import Session, play
from e2e.prefix_cache.shared_servers import FETCH_THRESHOLD

THRESHOLD_TOKENS = 400
LONG, SHORT, SHORTER = 450, 300, 150
"""Words of a question, which has about as many tokens. Longer ones than the threshold go to the greedy pool. What the
other pool added in a SHORT turn exceeds SGLang's threshold for fetches, what it added in a SHORTER turn does not."""
KINDS = list(product((False, True), (SHORT, SHORTER), (True, False)))
"""Each session: whether it is streamed, its shorter questions, and whether it begins in the greedy pool."""


def sessions(salt: str) -> list[Session]:
    """Concurrent sessions, one of each kind."""
    return [
        Session(number, salt, stream, [LONG, short, LONG] if greedy_first else [short, LONG, short])
        for number, (stream, short, greedy_first) in enumerate(KINDS)
    ]


def fewer_sessions(salt: str) -> list[Session]:
    """The sessions of `sessions` in which every move has enough tokens for a fetch."""
    return [session for session in sessions(salt) if SHORT in session.lengths]


async def gateway(processes: LocalProcesses, speculative: Engine, greedy: Engine) -> Gateway:
    """A gateway in front of these engines, which moves the sessions on every turn."""
    routing = {"thresholdTokens": THRESHOLD_TOKENS, "commonPrefixCache": True}
    return await processes.start_gateway([speculative], [greedy], {"routing": routing})


def check(moved: Sequence[Session], unmoved: Sequence[Session], page_tokens: int = PAGE_TOKENS) -> None:
    """Assert that sessions that moved on every turn have the answers of others, and almost as many cached tokens."""
    assert pools(moved) == [
        ["greedy" if words == LONG else "speculative" for words in session.lengths] for session in moved
    ]
    check_answers(moved, unmoved)
    assert lacking(moved, unmoved) <= page_tokens + FETCH_THRESHOLD


def pools(played: Sequence[Session]) -> list[list[str]]:
    """The pool that served each turn of each session."""
    return [[turn.pool for turn in session.turns] for session in played]


def check_answers(played: Sequence[Session], unmoved: Sequence[Session]) -> None:
    """Assert that each session has the answers and prompt lengths of the one with the same number in `unmoved`."""
    numbers = [session.number for session in played]
    assert answers(played) == answers([unmoved[number] for number in numbers])


async def check_not_cleared(writer: str, reader: str, unmoved: Sequence[Session]) -> None:
    """Assert that a server reads what another one has stored, although the latter was asked to clear the storage.

    writer, reader: the base URLs of both. unmoved: the same sessions on one server.
    """
    written, read = (fewer_sessions("cleared") for _ in range(2))
    await play(written, writer, {"": writer})
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{writer}/hicache/storage-backend/clear"),
    ):
        pass
    await play(read, reader, {})

    assert cached_at_first(read) > 0
    check_answers(read, unmoved)


def lacking(played: Sequence[Session], unmoved: Sequence[Session]) -> int:
    """How many tokens fewer were cached than in a session that never moved, in the turn with the largest difference."""
    return max(
        alone.cached_tokens - turn.cached_tokens
        for session in played
        for alone, turn in zip(unmoved[session.number].turns, session.turns, strict=True)
    )


def cached_share(played: Sequence[Session], unmoved: Sequence[Session]) -> float:
    """The cached tokens of sessions, divided by those of the sessions with the same numbers in `unmoved`."""
    return _cached(played) / _cached([unmoved[session.number] for session in played])


def cached_at_first(played: Sequence[Session]) -> int:
    """The cached tokens of the first turns."""
    return sum(session.turns[0].cached_tokens for session in played)


def answers(played: Sequence[Session]) -> list[list[tuple[str, int]]]:
    """The answer and the prompt length of each turn of each session."""
    return [[(turn.text, turn.prompt_tokens) for turn in session.turns] for session in played]


def _cached(played: Sequence[Session]) -> int:
    return sum(turn.cached_tokens for session in played for turn in session.turns)
