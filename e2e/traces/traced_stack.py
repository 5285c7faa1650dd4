"""All processes that produce traces: two gateways, Redis, two engines and Phoenix."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from dps_local.assets import qwen_tokenizer
from dps_local.sglang import SGLangOptions
from dps_local.stack import LocalStack, StackOptions
from e2e.real_sglang import local_sglang
from e2e.traces.phoenix import Phoenix

Engines = Literal["emulated", "sglang"]
EXPORT_INTERVALS = {"OTEL_BSP_SCHEDULE_DELAY": "200", "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "200"}
"""Export intervals in milliseconds; the defaults are several seconds."""
TRACE_LEVEL = {"SGLANG_TRACE_LEVEL": "2"}
"""Level 2 omits the span for each decoding step, which level 3 adds."""


@dataclass(frozen=True)
class TracedStack:
    """The running processes. The first gateway exports by gRPC, the second by HTTP."""

    phoenix: Phoenix
    stack: LocalStack


@asynccontextmanager
async def traced_stack(engines: Engines, phoenix: Phoenix) -> AsyncIterator[TracedStack]:
    """Start all processes, wait until they are ready, and stop them on exit."""
    stack = LocalStack(_options(engines, phoenix.grpc_url))
    first, second = stack.gateways
    first.environment |= EXPORT_INTERVALS
    second.environment |= EXPORT_INTERVALS | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": phoenix.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    for engine in stack.engines.values():
        engine.environment |= EXPORT_INTERVALS | TRACE_LEVEL
    async with stack:
        yield TracedStack(phoenix, stack)


def _options(engines: Engines, otlp_endpoint: str) -> StackOptions:
    sglang = None
    if engines == "sglang":
        model = str(local_sglang.tiny_model())
        sglang = SGLangOptions(model, draft_model=model, python=str(local_sglang.PYTHON))
    return StackOptions(qwen_tokenizer().path, gateways=2, sglang=sglang, otlp_endpoint=otlp_endpoint)
