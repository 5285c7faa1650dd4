"""The settings of an emulated SGLang server: the parsed flags of `dps engine`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dps_local.emulated_sglang.storage import StorageOptions
from dps_local.emulated_sglang.time_model import TimeModel

VERSION = "0.5.23+emulated"
"""The emulated version of SGLang. The local version label marks it as an emulation."""

MAX_RUNNING_SPECULATIVE = 48
"""SGLang's default of --max-running-requests with speculative decoding."""


@dataclass(frozen=True)
class EngineSettings:
    """The settings of one engine. The defaults model Qwen2.5-7B-Instruct on an A100 80 GB.

    max_total_tokens: capacity of the KV cache, including running requests.
    speed: emulated seconds per real second.
    page_tokens: tokens per page of the KV cache; only whole pages are found in it.
    storage: the storage level of the prefix cache; None if the engine shares no pages.
    arguments: SGLang's flags from the command line, for /server_info.
    """

    tokenizer_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    model_path: str = "Qwen/Qwen2.5-7B-Instruct"
    served_model_name: str = "Qwen/Qwen2.5-7B-Instruct"
    api_key: str | None = None
    context_length: int = 32_768
    max_running_requests: int = 2048
    max_queued_requests: int | None = None
    max_total_tokens: int = 900_000
    enable_cache_report: bool = True
    enable_response_store: bool = False
    time_model: TimeModel = field(default_factory=TimeModel)
    serialized_speculation: bool = False
    speed: float = 1.0
    seed: int = 0
    page_tokens: int = 1
    storage: StorageOptions | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
