"""Request models: the fields of SGLang 0.5.23's entrypoints/openai/protocol.py that affect the response.

Unknown fields are ignored, as in SGLang.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, field_validator, model_validator

from dps_local.emulated_sglang.generation import SamplingFields, SamplingParams
from dps_local.emulated_sglang.radix import Namespace


def _check_max_tokens(value: int) -> int:
    if value <= 0:
        raise ValueError("max_tokens must be positive")
    return value


MaxTokens = Annotated[int, AfterValidator(_check_max_tokens)]
"""A required limit of the answer's length, with SGLang's error message."""


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingPart(BaseModel):
    type: Literal["thinking", "reasoning"]
    thinking: str | None = None
    text: str | None = None


class MediaPart(BaseModel):
    """Parsed only to be rejected: the emulated model accepts text only."""

    type: Literal["image_url", "video_url", "audio_url", "input_audio"]


class ToolReferencePart(BaseModel):
    type: Literal["tool_reference"]
    name: str


ContentPart = TextPart | ThinkingPart | MediaPart | ToolReferencePart


class CalledFunction(BaseModel):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(BaseModel):
    description: str | None = None
    name: str
    parameters: Any = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(BaseModel):
    type: str = "function"
    function: Function
    defer_loading: bool | None = None


class GenericMessage(BaseModel):
    role: Literal["system", "assistant", "tool", "function", "developer", "latest_reminder", "root"]
    content: str | list[ContentPart] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tools: list[Tool] | None = None
    prefix: bool | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _lower_role(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class UserMessage(BaseModel):
    role: Literal["user"]
    content: str | list[ContentPart]


class NamedFunction(BaseModel):
    name: str | None = None


class ToolChoice(BaseModel):
    function: NamedFunction
    type: Literal["function"] = "function"


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CacheFields(BaseModel):
    """The fields that separate the KV caches of requests: a string, or a list with one string for each prompt."""

    extra_key: list[str] | str | None = None
    cache_salt: list[str] | str | None = None

    def namespaces(self, prompts: int, *, batch: bool) -> list[Namespace]:
        """The namespace of each prompt. Raises ValueError with SGLang's message if a list does not fit."""
        extra_keys = _spread("extra_key", self.extra_key, prompts, batch)
        cache_salts = _spread("cache_salt", self.cache_salt, prompts, batch)
        return list(zip(extra_keys, cache_salts, strict=True))


def _spread(field: str, value: list[str] | str | None, prompts: int, batch: bool) -> list[str | None]:
    if not isinstance(value, list):
        return [value or None] * prompts
    if not batch:
        raise ValueError(f"{field} should be a string for a single request.")
    if len(value) != prompts:
        raise ValueError(f"The length of {field} should be equal to the batch size.")
    return [item or None for item in value]


class OpenAIRequest(CacheFields, SamplingFields):
    """The fields that both OpenAI endpoints have."""

    model: str = "default"
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    rid: str | None = None
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every content chunk includes usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def longest(self) -> int | None:
        """The limit of the answer's length in tokens."""
        return self.max_tokens

    def sampling(self) -> SamplingParams:
        """The engine's sampling parameters."""
        fields = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return SamplingParams(max_new_tokens=self.longest, **fields)


class CompletionRequest(OpenAIRequest):
    prompt: list[int] | list[list[int]] | str | list[str]
    echo: bool = False
    max_tokens: MaxTokens | None = 16


class ChatRequest(OpenAIRequest):
    messages: list[GenericMessage | UserMessage]
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | Literal["auto", "required", "none"] | None = None
    reasoning_effort: str | float | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    input_ids: list[int] | None = None
    body: dict[str, Any]
    """The request as it was sent, from which the prompt is rendered."""

    @model_validator(mode="before")
    @classmethod
    def _keep_body(cls, values: Any) -> Any:
        return {**values, "body": values} if isinstance(values, dict) else values

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class GenerateRequest(CacheFields):
    """SGLang's native request: `text` or `input_ids`, a single prompt or a batch."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    stream: bool = False
    rid: str | list[str] | None = None
