"""Sessions of an unmodified OpenAI client, with the routing decision of each turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

SYSTEM = "You are brief."
SHORT, LONG = "And then?", "Consider all of this, point by point, and compare it with what was said. " * 40


@dataclass(frozen=True)
class Turn:
    """The decision for one turn, and the token counts reported by the engine."""

    pool: str
    reason: str
    prompt_tokens: int
    delta_tokens: int
    number: int
    engine_prompt_tokens: int
    cached_tokens: int
    answer: str


def alternating(count: int) -> list[str]:
    """Questions of which every second one is short."""
    return [SHORT if number % 2 else LONG for number in range(count)]


def turns(
    url: str,
    model: str,
    questions: Sequence[str] = tuple(alternating(4)),
    answer_tokens: int = 16,
    system: str = SYSTEM,
) -> Iterator[Turn]:
    """Send a session without a session id. Sessions with the same questions differ if `system` does."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        answers: list[str] = []
        for asked in range(1, len(questions) + 1):
            raw = client.chat.completions.with_raw_response.create(
                model=model,
                messages=messages(questions[:asked], answers, system),
                max_tokens=answer_tokens,
                temperature=0,
            )
            answer = raw.parse()
            answers.append(answer.choices[0].message.content or "")
            usage = answer.usage
            assert usage is not None
            details = usage.prompt_tokens_details
            yield Turn(
                pool=raw.headers["x-dps-pool"],
                reason=raw.headers["x-dps-reason"],
                prompt_tokens=int(raw.headers["x-dps-prompt-tokens"]),
                delta_tokens=int(raw.headers["x-dps-delta-tokens"]),
                number=int(raw.headers["x-dps-turn"]),
                engine_prompt_tokens=usage.prompt_tokens,
                cached_tokens=(details.cached_tokens or 0) if details else 0,
                answer=answers[-1],
            )


def messages(
    questions: Sequence[str], answers: Sequence[str], system: str = SYSTEM
) -> list[ChatCompletionMessageParam]:
    """The messages of a turn: the questions up to it, each with its answer but the last."""
    history: list[ChatCompletionMessageParam] = [{"role": "system", "content": system}]
    for number, question in enumerate(questions):
        history.append({"role": "user", "content": f"{number}. {question}"})
        if number < len(questions) - 1:
            history.append({"role": "assistant", "content": answers[number]})
    return history
