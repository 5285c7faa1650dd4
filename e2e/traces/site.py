"""All that makes traces, on this machine: a client, two gateways, Redis, two engines, and Phoenix."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from dps_local.assets import qwen_tokenizer
from dps_local.sglang import SGLangOptions
from dps_local.stack import LocalStack, StackOptions
from e2e.real_sglang import local_sglang
from e2e.traces.phoenix import Phoenix
from e2e.traces.relay import Relay, relay_to

Engines = Literal["emulated", "sglang"]
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "200", "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "200"}
"""Milliseconds; both wait for seconds unless told otherwise."""
LEVEL = {"SGLANG_TRACE_LEVEL": "2"}
"""SGLang's spans without one for each round of decoding, which is level 3."""


@dataclass(frozen=True)
class Site:
    """What runs. The first gateway's spans go by gRPC through the relay, the second's by HTTP to Phoenix itself."""

    phoenix: Phoenix
    relay: Relay
    stack: LocalStack


@asynccontextmanager
async def site(engines: Engines, phoenix: Phoenix) -> AsyncIterator[Site]:
    """Everything up and ready, and nothing left of it afterwards."""
    with relay_to(phoenix.grpc_url) as relay:
        stack = LocalStack(_options(engines, phoenix.grpc_url))
        first, second = stack.gateways
        first.environment |= SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": relay.url}
        second.environment |= SOON | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": phoenix.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        for engine in stack.engines.values():
            engine.environment |= SOON | LEVEL
        async with stack:
            yield Site(phoenix, relay, stack)


def _options(engines: Engines, otlp_endpoint: str) -> StackOptions:
    sglang = None
    if engines == "sglang":
        model = str(local_sglang.tiny_model())
        sglang = SGLangOptions(model, draft_model=model, python=str(local_sglang.PYTHON))
    return StackOptions(qwen_tokenizer().path, gateways=2, sglang=sglang, otlp_endpoint=otlp_endpoint)
