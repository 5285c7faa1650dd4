"""What one emulated engine is: the flags of `dps engine`, parsed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dps_local.emulated_sglang.time_model import TimeModel

VERSION = "0.5.23+emulated"
"""Of which SGLang this is an emulation; the local version label says that it is one."""


@dataclass(frozen=True)
class EngineSettings:
    """One engine. Defaults are those of an A100 80 GB with Qwen2.5-7B-Instruct; `speed` compresses time.

    `max_total_tokens` is the radix cache's capacity, running requests included. `mean_answer_tokens` is how
    long an answer gets that no max_tokens ends. `arguments` are SGLang's flags as they were given, for
    /server_info.
    """

    tokenizer_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    model_path: str = "Qwen/Qwen2.5-7B-Instruct"
    served_model_name: str = "Qwen/Qwen2.5-7B-Instruct"
    api_key: str | None = None
    context_length: int = 32_768
    max_running_requests: int = 2048
    max_total_tokens: int = 900_000
    enable_cache_report: bool = True
    time_model: TimeModel = field(default_factory=TimeModel)
    serialized_speculation: bool = False
    speed: float = 1.0
    seed: int = 0
    mean_answer_tokens: float = 96.0
    arguments: Mapping[str, object] = field(default_factory=dict)
