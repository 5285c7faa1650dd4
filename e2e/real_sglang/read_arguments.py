# mypy: disable-error-code="import-not-found"
"""read_arguments.py OUT: what SGLang makes of command lines, by the function that its launcher reads them with.

Run by an interpreter that has SGLang. Command lines come as JSON on standard input, a list of lists; OUT gets a
list of objects, one a command line. One that SGLang refuses ends the process, as it would end the launcher.
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
    read = []
    for command_line in json.load(sys.stdin):
        arguments = prepare_server_args(command_line)
        if hasattr(arguments, "resolve_once"):  # 0.5.8 does this while it parses
            arguments.resolve_once()
        read.append({name: getattr(arguments, name) for name in FIELDS})
    Path(sys.argv[1]).write_text(json.dumps(read))
