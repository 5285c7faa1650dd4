"""Concurrent sessions that change pools on every turn, and a comparison with sessions that never moved."""

from collections.abc import Sequence
from itertools import product

from dps_testkit.processes import Engine, Gateway, Site
from e2e.prefix_cache.sessions import Session
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


async def gateway(site: Site, speculative: Engine, greedy: Engine) -> Gateway:
    """A gateway in front of these engines, which moves the sessions on every turn."""
    routing = {"thresholdTokens": THRESHOLD_TOKENS, "commonPrefixCache": True}
    return await site.gateway([speculative], [greedy], {"routing": routing})


def check(moved: Sequence[Session], unmoved: Sequence[Session], page_tokens: int) -> None:
    """Assert that sessions that moved on every turn have the answers of others, and almost as many cached tokens."""
    assert [[turn.pool for turn in session.turns] for session in moved] == [
        ["greedy" if words == LONG else "speculative" for words in session.lengths] for session in moved
    ]
    assert [[(turn.text, turn.prompt_tokens) for turn in session.turns] for session in moved] == [
        [(turn.text, turn.prompt_tokens) for turn in session.turns] for session in unmoved
    ]
    not_cached = [
        [
            alone.cached_tokens - turn.cached_tokens
            for alone, turn in zip(other.turns, session.turns, strict=True)
        ]
        for other, session in zip(unmoved, moved, strict=True)
    ]
    assert max(map(max, not_cached)) <= page_tokens + FETCH_THRESHOLD, not_cached
