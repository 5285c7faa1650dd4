"""A traced client: it uses the `openai` SDK and creates a span for each turn."""

from dataclasses import dataclass
from typing import Any

import openai
from openai.types import CompletionUsage
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

SPAN = "agent turn"
MAX_TOKENS = 24

SHORT = "And why is that?"
LONG = "Here is more of the log: the linker did not find the symbol that step 14 had promised. " * 12
TURNS = [
    (False, "A build failed. Read its log and tell me what is wrong. " + LONG),
    (True, SHORT),
    (False, LONG),
    (True, SHORT),
]
"""Per turn: streaming or not, and the user message. Only the first and third turn add more than τ = 128 tokens."""


@dataclass(frozen=True)
class Turn:
    """One turn as observed by the client."""

    trace_id: str
    headers: dict[str, str]
    """Response headers."""
    response_id: str
    usage: CompletionUsage
    streamed: bool


class Agent:
    """Sends the turns of one conversation, each as a trace."""

    def __init__(self, model: str, otlp_endpoint: str, conversation_id: str | None = None) -> None:
        """conversation_id: sent as x-session-id. Without it the gateway recognises the session by its history."""
        self._model = model
        self._conversation_id = conversation_id
        self._messages: list[Any] = []
        resource = Resource.create({SERVICE_NAME: "agent"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=True)
        self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("agent")

    def close(self) -> None:
        """Flush and stop the exporter."""
        self._provider.shutdown()

    def send(self, base_url: str, text: str, *, stream: bool) -> Turn:
        """Send one turn to a gateway and add the answer to the history. Raises openai.OpenAIError."""
        self._messages.append({"role": "user", "content": text})
        with (
            openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300) as client,
            self._tracer.start_as_current_span(SPAN) as span,
        ):
            headers: dict[str, str] = {}
            inject(headers)
            if self._conversation_id is not None:
                headers["x-session-id"] = self._conversation_id
            request: dict[str, Any] = {
                "model": self._model,
                "messages": self._messages,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "extra_headers": headers,
            }
            if stream:
                request["stream_options"] = {"include_usage": True}
            raw = client.chat.completions.with_raw_response.create(**request, stream=stream)
            # The parts of a stream, or the whole answer; both kinds of choices are read alike.
            parts: list[Any] = list(raw.parse()) if stream else [raw.parse()]
            choices = [choice for part in parts for choice in part.choices]
            text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
            self._messages.append({"role": "assistant", "content": text})
            trace_id = f"{span.get_span_context().trace_id:032x}"
            return Turn(trace_id, dict(raw.headers), parts[-1].id, parts[-1].usage, stream)
