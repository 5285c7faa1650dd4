"""Chat turns that are sent through a gateway to SGLang with the client of OpenAI."""

from collections.abc import Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam


@dataclass(frozen=True)
class Turn:
    """An answer, the gateway's decision, and the token counts reported by the engine."""

    text: str
    headers: dict[str, str]
    prompt_tokens: int
    cached_tokens: int

    @property
    def message(self) -> ChatCompletionMessageParam:
        """The answer as a part of the history."""
        return {"role": "assistant", "content": self.text}

    @property
    def counted(self) -> tuple[int, int]:
        """The gateway's counts of the prompt, and of the tokens that are new."""
        return int(self.headers["x-dps-prompt-tokens"]), int(self.headers["x-dps-delta-tokens"])


async def send(
    client: AsyncOpenAI, model: str, messages: Sequence[ChatCompletionMessageParam], answer_tokens: int
) -> Turn:
    """Send a chat whose answer has `answer_tokens` tokens."""
    answer = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,
        max_tokens=answer_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    completion = answer.parse()
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return Turn(
        completion.choices[0].message.content or "",
        {name: value for name, value in answer.headers.items() if name.startswith("x-dps-")},
        completion.usage.prompt_tokens,
        completion.usage.prompt_tokens_details.cached_tokens or 0,
    )
