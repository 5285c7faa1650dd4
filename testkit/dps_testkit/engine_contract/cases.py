"""Requests of the contract with SGLang, in the order in which they are sent to a real and an emulated server.

The order matters: `cached_tokens` depends on the content of the prefix cache when a request arrives. Output
lengths are compared and output text is not, so requests set a fixed number of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = "Qwen/Qwen2.5-7B-Instruct"
CONTEXT_TOKENS = 32_768
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Case:
    """One request. `body` is sent as JSON, or unchanged if it is bytes."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


def chat(name: str, *, messages: Any = None, **fields: Any) -> Case:
    """A chat request for eight tokens at temperature 0."""
    body = {"model": MODEL, "messages": QUESTION if messages is None else messages}
    return Case(f"chat: {name}", "POST", CHAT, body | EIGHT | fields)


def messages(name: str, **fields: Any) -> Case:
    """A request of Anthropic's Messages API for eight tokens at temperature 0."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    return Case(f"messages: {name}", "POST", MESSAGES, body | fields)


def responses(name: str, **fields: Any) -> Case:
    """A request of OpenAI's Responses API for eight tokens at temperature 0."""
    # SGLang subtracts two tokens.
    body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 10, "temperature": 0}
    return Case(f"responses: {name}", "POST", RESPONSES, body | fields)


def completions(name: str, prompt: Any, **fields: Any) -> Case:
    """A completions request for eight tokens at temperature 0."""
    return Case(
        f"completions: {name}", "POST", COMPLETIONS, {"model": MODEL, "prompt": prompt} | EIGHT | fields
    )


def generate(name: str, n: int = 1, **fields: Any) -> Case:
    """A /generate request for eight tokens at temperature 0."""
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True} | ({"n": n} if n > 1 else {})
    return Case(f"generate: {name}", "POST", GENERATE, {"sampling_params": sampling} | fields)


EIGHT: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What is the weather in Zürich?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Today's", "parameters": PARAMETERS},
}
FUNCTION = {"type": "function", "name": "weather", "description": "Today's", "parameters": PARAMETERS}
ARGUMENTS = '{"city": "Zürich"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
AFTER_TOOL_CALL = [
    {"role": "system", "content": [{"type": "text", "text": "You are"}, {"type": "text", "text": "terse."}]},
    *QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
SECOND_TURN = [
    *QUESTION,
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "And in Bern?"},
]
STREAM: dict[str, Any] = {"stream": True}
WITH_USAGE: dict[str, Any] = STREAM | {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = STREAM | {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}
TOO_LONG = "word " * (CONTEXT_TOKENS + 100)

GENERATIONS: tuple[Case, ...] = (
    chat("first turn of a session"),
    chat("the same again"),
    chat("second turn", messages=SECOND_TURN),
    chat(
        "tools, tool call, parts, template arguments",
        messages=AFTER_TOOL_CALL,
        tools=[TOOL],
        chat_template_kwargs={"enable_thinking": False},
    ),
    chat("two choices", n=2, messages=[{"role": "user", "content": "Two of them"}]),
    chat("max_completion_tokens", max_tokens=None, max_completion_tokens=3),
    chat("stream", **STREAM),
    chat("stream with usage", **WITH_USAGE),
    chat("stream with continuous usage", **CONTINUOUS),
    chat("stream of two choices", n=2, **WITH_USAGE),
    completions("string", "Once upon a time"),
    completions("token ids", [12522, 5193, 264, 882, 1052]),
    completions("list of strings", ["First of two", "Second of both"]),
    completions("echo", "Once upon a time", echo=True),
    completions("stream", "Once upon a time", **STREAM),
    completions("stream with usage", "Once upon a time", **WITH_USAGE),
    generate("text", text="Far away in a land"),
    generate("input_ids", input_ids=[12522, 5193, 264, 882, 374]),
    generate("batch of texts", text=["Third of these", "Fourth among them"]),
    generate("batch of input_ids", input_ids=[[785, 4843], [785, 3974, 13876]]),
    generate("stream", text="Far away in a land", **STREAM),
)

ERRORS: tuple[Case, ...] = (
    Case("error: not JSON", "POST", CHAT, b'{"model": ', JSON),
    Case("error: content type", "POST", CHAT, b"{}", {"content-type": "text/plain"}),
    Case("error: messages missing", "POST", CHAT, {"model": MODEL}),
    chat("error: messages empty", messages=[]),
    chat("error: role unknown", messages=[{"role": "oracle", "content": "x"}]),
    chat(
        "error: image",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    chat(
        "error: tool arguments not JSON",
        messages=[
            *QUESTION,
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{"}}]},
            {"role": "tool", "content": "x"},
        ],
    ),
    chat("error: prompt too long", messages=[{"role": "user", "content": TOO_LONG}]),
    chat("error: prompt too long, stream", messages=[{"role": "user", "content": TOO_LONG}], **STREAM),
    chat("error: max_tokens over the context", max_tokens=CONTEXT_TOKENS + 1),
    chat("error: prompt and max_tokens over the context", max_tokens=CONTEXT_TOKENS - 1),
    chat("error: temperature negative", temperature=-1),
    chat("wrong model", model="another"),
    completions("error: prompt empty", ""),
    completions("error: prompt missing", None),
    completions("error: prompt too long", TOO_LONG),
    generate("error: no prompt"),
    generate("error: too long", text=TOO_LONG),
    generate("error: too long, stream", text=TOO_LONG, **STREAM),
    Case("error: generate not JSON", "POST", GENERATE, b"{", JSON),
    Case("error: unknown route", "POST", "/v1/nothing", {}),
    Case("error: method", "GET", CHAT),
    Case("error: embeddings of a generation model", "POST", "/v1/embeddings", {"model": MODEL, "input": "x"}),
    Case("error: gone /get_load", "GET", "/get_load"),
)

INFORMATION: tuple[Case, ...] = (
    Case("models", "GET", "/v1/models"),
    Case("model", "GET", f"/v1/models/{MODEL}"),
    Case("model unknown", "GET", "/v1/models/another"),
    Case("health", "GET", "/health"),
    Case("ready", "GET", "/ready"),
    Case("ping", "GET", "/ping"),
    Case("server_info", "GET", "/server_info"),
    Case("get_server_info", "GET", "/get_server_info"),
    Case("model_info", "GET", "/model_info"),
    Case("get_model_info", "GET", "/get_model_info"),
    Case("loads", "GET", "/v1/loads"),
    Case("loads: everything", "GET", "/v1/loads?include=all"),
    Case("flush_cache", "POST", "/flush_cache"),
    Case("abort_request of nothing", "POST", "/abort_request", {"rid": "nothing"}),
)

ANTHROPIC: tuple[Case, ...] = (
    messages("first turn of a session"),
    messages("the same again"),
    messages("second turn", messages=SECOND_TURN),
    messages("stream", **STREAM),
    messages("stream that is not cached", messages=[{"role": "user", "content": "A stream"}], **STREAM),
    messages("error: max_tokens missing", max_tokens=None),
    messages("error: max_tokens zero", max_tokens=0),
    messages("error: messages empty", messages=[]),
    messages("error: prompt and max_tokens over the context", max_tokens=CONTEXT_TOKENS - 1),
    messages(
        "error: prompt and max_tokens over the context, stream", max_tokens=CONTEXT_TOKENS - 1, **STREAM
    ),
    Case("messages: error: not JSON", "POST", MESSAGES, b'{"model": ', JSON),
    Case("messages: error: content type", "POST", MESSAGES, b"{}", {"content-type": "text/plain"}),
    Case("messages: error: method", "GET", MESSAGES),
    Case("messages: count", "POST", f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": QUESTION}),
    Case("messages: count: error: messages missing", "POST", f"{MESSAGES}/count_tokens", {"model": MODEL}),
)
"""Sent last, after the prefix cache has been emptied."""

ASKING: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Where was this cached?"}],
    "return_cached_tokens_details": True,
}
SOURCES: tuple[Case, ...] = (
    chat("sources of cached tokens: few cached", **ASKING),
    chat("sources of cached tokens", **ASKING),
    chat("sources of cached tokens, stream", **ASKING, **STREAM),
    chat("sources of cached tokens, stream with usage", **ASKING, **WITH_USAGE),
    completions("sources of cached tokens: none cached", "Where?", return_cached_tokens_details=True),
    completions("sources of cached tokens", "Where?", return_cached_tokens_details=True),
    completions(
        "sources of cached tokens, stream", "Where?", return_cached_tokens_details=True, **WITH_USAGE
    ),
)

OPENAI_RESPONSES: tuple[Case, ...] = (
    responses("first turn of a session"),
    responses("the same again"),
    responses("text", input="What is the weather in Bern?", instructions="Be terse."),
    responses("second turn", input=SECOND_TURN),
    responses("stream", **STREAM),
    responses("stream with tools", tools=[FUNCTION], tool_choice="none", metadata={"a": "b"}, **STREAM),
    responses("background", background=True, input="In the background"),
    responses("error: input missing", input=None),
    responses("error: input empty", input=[]),
    responses("error: input item unknown", input=[{"type": "oracle"}]),
    responses("error: model unknown", model="another"),
    responses("error: previous response unknown", previous_response_id="resp_unknown"),
    responses("error: tool choice without tools", tool_choice="required"),
    responses("error: prompt and answer over the context", max_output_tokens=CONTEXT_TOKENS - 1),
    responses(
        "error: prompt and answer over the context, stream", max_output_tokens=CONTEXT_TOKENS - 1, **STREAM
    ),
    Case("responses: error: not JSON", "POST", RESPONSES, b'{"model": ', JSON),
    Case("responses: error: content type", "POST", RESPONSES, b"{}", {"content-type": "text/plain"}),
    Case("responses: error: unknown id", "GET", f"{RESPONSES}/resp_unknown"),
    Case("responses: error: invalid id", "GET", f"{RESPONSES}/unknown"),
    Case("responses: error: cancel an unknown id", "POST", f"{RESPONSES}/resp_unknown/cancel"),
)
"""Sent last, to an engine with a response store."""

GREEDY: tuple[Case, ...] = (*GENERATIONS, *ERRORS, *INFORMATION, *ANTHROPIC, *SOURCES, *OPENAI_RESPONSES)
SPECULATIVE: tuple[Case, ...] = (
    chat("first turn of a session"),
    chat("second turn", messages=SECOND_TURN),
    chat("stream with usage", **WITH_USAGE),
    generate("text", text="Far away in a land"),
    generate("stream", text="Far away in a land", **STREAM),
    # SGLang reports the acceptance length only after about forty decode steps.
    chat("long", max_tokens=200),
    Case("server_info", "GET", "/server_info"),
    Case("loads: everything", "GET", "/v1/loads?include=all"),
)
