"""The operator's command lines, read by SGLang's own parser.

SGLANG_VENV is the virtual environment that ./install made: python -m e2e.engine_truth.check_arguments
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dps_operator.api.spec import parse
from dps_operator.build.engine_args import engine_args

SHIM = Path(__file__).parent / "shim"
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
known = parser.parse_args(json.loads(sys.argv[1]))
print(json.dumps({name: getattr(known, name) for name in json.loads(sys.argv[2])}))
"""
READ = (
    "model_path", "served_model_name", "tp_size", "enable_metrics", "enable_cache_report", "enable_trace",
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
SPECULATIONS: tuple[dict[str, Any], ...] = (
    {"algorithm": "Standalone", "draftModel": "draft"},
    {"algorithm": "Eagle", "draftModel": "draft", "steps": 3, "topK": 4},
    {"algorithm": "Eagle3", "draftModel": "draft", "steps": 5, "topK": 8, "draftTokens": 32},
    {"algorithm": "Ngram"},
)


def main() -> int:
    """0 if SGLang's parser takes every command line, else 1; prints what it understood."""
    python = Path(os.environ.get("SGLANG_VENV", "")) / "bin/python"
    environment = {**os.environ, "PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    failed = 0
    for speculation in SPECULATIONS:
        spec = parse(
            {
                "model": {"name": "model"},
                "engine": {"tensorParallel": 2, "args": ["--mem-fraction-static", "0.8"]},
                "pools": {"speculative": {"speculation": speculation}},
                "telemetry": {"otlpEndpoint": "http://collector:4317"},
            }
        )
        for pool in (spec.pools.speculative, spec.pools.greedy):
            arguments = engine_args(spec, pool)
            command = [str(python), "-c", PARSE, json.dumps(arguments), json.dumps(READ)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            failed += done.returncode != 0
            print(
                done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr.strip()[-500:]
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
