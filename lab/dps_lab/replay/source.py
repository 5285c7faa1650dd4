"""The sources of sessions that `dps replay --sessions` accepts."""

from pathlib import Path

from dps_lab.workload.assets import bfcl, bundled_sessions
from dps_lab.workload.bfcl import load_bfcl
from dps_lab.workload.sessions import Session, load_sessions
from dps_lab.workload.toolbench import toolbench_sessions
from dps_local.assets import qwen_tokenizer
from dps_local.emulated_sglang.prompt import Prompts

NAMED_SOURCES = ("bfcl", "toolbench", "sample")


def load_source(name: str) -> tuple[str, list[Session]]:
    """The description and the sessions of one of NAMED_SOURCES, or of a JSONL file.

    Raises OSError if the file cannot be read, and SessionFormatError if it is not in the session format.
    """
    match name:
        case "bfcl":
            asset = bfcl()
            load = load_bfcl if asset.source == "registry" else load_sessions
            return asset.description, load(asset.path)
        case "toolbench":
            tokenizer = qwen_tokenizer()
            return (
                f"synthetic sessions with ToolBench's lengths, counted with {tokenizer.description}",
                toolbench_sessions(Prompts.load(str(tokenizer.path))),
            )
        case "sample":
            return "the bundled sample sessions", load_sessions(bundled_sessions())
        case file:
            return file, load_sessions(Path(file))
