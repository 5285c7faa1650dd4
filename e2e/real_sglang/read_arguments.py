# mypy: disable-error-code="import-not-found"
"""read_arguments.py OUT: parse command lines with the function that SGLang's launcher uses.

Needs an interpreter with SGLang. Reads a JSON list of command lines (lists of strings) from standard input and writes
a JSON list with one object per command line to OUT. An invalid command line ends the process, as in the launcher.
"""

import json
import sys
from pathlib import Path

from sglang.srt.server_args import prepare_server_args

FIELDS = (
    "model_path", "served_model_name", "host", "port", "tp_size", "device", "mem_fraction_static",
    "enable_metrics", "enable_cache_report", "enable_trace", "otlp_traces_endpoint",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip

if __name__ == "__main__":
    parsed = []
    for command_line in json.load(sys.stdin):
        arguments = prepare_server_args(command_line)
        if hasattr(arguments, "resolve_once"):  # 0.5.8 resolves defaults while parsing
            arguments.resolve_once()
        parsed.append({name: getattr(arguments, name) for name in FIELDS})
    Path(sys.argv[1]).write_text(json.dumps(parsed))
