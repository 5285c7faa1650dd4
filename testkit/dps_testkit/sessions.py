"""Synthetic sessions, sent turn by turn to a gateway, and the decisions expected for them."""

from collections.abc import Iterable, Sequence

from dps_lab.replay.client import Client
from dps_lab.replay.oracle import Decision, expected_by_session
from dps_lab.replay.records import TurnRecord
from dps_lab.workload.sessions import Session, Turn
from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.prompt import Prompts


def synthetic_sessions(count: int, turns: int, topic: str = "talk") -> list[Session]:
    """Sessions without common history. Odd turns add few tokens, even turns more than 128."""
    return [
        Session(
            id=f"{topic}-{number}",
            system=f"You are assistant {number} of the {topic} desk.",
            turns=[
                Turn(
                    messages=[{"role": "user", "content": _question(turn)}],
                    answer={"role": "assistant", "content": f"Answer {turn}."},
                    max_tokens=4,
                )
                for turn in range(1, turns + 1)
            ],
        )
        for number in range(count)
    ]


def _question(turn: int) -> str:
    return f"Question {turn}: " + ("and why? " if turn % 2 else "tell me about the sky, please. " * 30)


def expected(sessions: Iterable[Session], threshold_tokens: float = 128) -> dict[str, list[Decision]]:
    """The decisions of the offline oracle with the bundled tokenizer, by session id."""
    return expected_by_session(sessions, Prompts.load(str(bundled_tokenizer())), threshold_tokens)


async def play(client: Client, session: Session, numbers: Sequence[int]) -> list[TurnRecord]:
    """Send these turns of a session (numbered from 1) in order, with the recorded answers as history."""
    prompts = list(session.prompts())
    return [(await client.send(session, number, prompts[number - 1]))[0] for number in numbers]


def decided(record: TurnRecord) -> Decision:
    """The gateway's decision for a turn. Raises AssertionError if the turn failed."""
    verdict = record.verdict
    assert record.error is None, record.error
    assert verdict.pool is not None
    assert verdict.delta_tokens is not None
    assert verdict.prompt_tokens is not None
    assert verdict.turn is not None
    return Decision(verdict.pool, verdict.delta_tokens, verdict.prompt_tokens, verdict.turn)
