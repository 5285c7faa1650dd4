"""The fields of an engine's /server_info that clients may read. This module performs no I/O.

SGLang's answer contains all arguments of the server, among them its API keys and the command line that it was started
with.
"""

from collections.abc import Sequence
from typing import Any, Final

import orjson

PATH: Final = "/server_info"

_FIELDS: Final = frozenset(
    {
        "version",
        "served_model_name",
        "model_path",
        "tokenizer_path",
        "context_length",
        "max_total_num_tokens",
        "max_running_requests",
        "max_req_input_len",
        "chunked_prefill_size",
        "page_size",
        "tp_size",
        "dp_size",
        "dtype",
        "kv_cache_dtype",
        "quantization",
        "disable_radix_cache",
        "enable_cache_report",
        "random_seed",
        "speculative_algorithm",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "internal_states",
    }
)
_STATE_FIELDS: Final = frozenset({"avg_spec_accept_length", "last_gen_throughput", "memory_usage"})


def public_info(contents: Sequence[bytes]) -> bytes:
    """The fields of the one answer that contain no secret. Raises ValueError if it is not a JSON object."""
    (content,) = contents
    info = orjson.loads(content)
    if not isinstance(info, dict):
        raise ValueError("the engine's information is not a JSON object")
    public = _only(info, _FIELDS)
    states = public.pop("internal_states", None)
    if isinstance(states, list):
        public["internal_states"] = [_only(each, _STATE_FIELDS) for each in states if isinstance(each, dict)]
    return orjson.dumps(public)


def _only(document: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name in names}
