"""SGLang 0.5.8.post1 and 0.5.23 parse the command lines of the operator and `dps up` as intended."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dps_engines.pools import POOLS, PoolName
from dps_local.sglang import Placement, SGLangOptions, sglang_command
from dps_operator.builders.launch import engine_arguments
from dps_testkit.operator.routers import router
from e2e.real_sglang.local_sglang import HERE, PYTHON, VENV, install, tiny_model

pytestmark = pytest.mark.timeout(2400)

VERSIONS = ("0.5.8.post1", "0.5.23")
READ_SECONDS = 600.0
ON_GPU = ["--device", "cuda"]
"""Added for the test only; without it SGLang looks for a GPU."""

SPECULATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Standalone": (
        {"algorithm": "Standalone", "draftModel": "MODEL"},
        {"algorithm": "STANDALONE", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
    ),
    "Eagle, draft tree": (
        {"algorithm": "Eagle", "draftModel": "MODEL", "steps": 3, "topK": 4},
        {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 13},
    ),
    "Eagle3, truncated draft tree": (
        {"algorithm": "Eagle3", "draftModel": "MODEL", "steps": 5, "topK": 8, "draftTokens": 32},
        {"algorithm": "EAGLE3", "num_steps": 5, "eagle_topk": 8, "num_draft_tokens": 32},
    ),
    "Ngram": ({"algorithm": "Ngram"}, {"algorithm": "NGRAM", "num_draft_tokens": 12}),
}
"""`speculation` of a DPSRouter, and the expected fields of SGLang without the prefix `speculative_`."""


@dataclass(frozen=True)
class Case:
    """A command line, and the values that SGLang must parse from it."""

    name: str
    arguments: list[str]
    expected: dict[str, Any]


def speculative(model: str, expected: dict[str, Any]) -> dict[str, Any]:
    draft = {} if expected["algorithm"] == "NGRAM" else {"draft_model_path": model}
    return {f"speculative_{name}": value for name, value in (expected | draft).items()}


def operators(model: str) -> Iterator[Case]:
    """The command lines of both pools, for each speculation algorithm."""
    for name, (speculation, expected) in SPECULATIONS.items():
        drafting = {key: model if value == "MODEL" else value for key, value in speculation.items()}
        made = router(
            {
                "model": {"name": model, "servedName": "served"},
                "engine": {"tensorParallel": 2, "args": ["--mem-fraction-static", "0.8"]},
                "pools": {"speculative": {"speculation": drafting}},
                "telemetry": {"otlpEndpoint": "http://collector:4317"},
            }
        )
        for pool in POOLS:
            yield Case(
                f"operator, {name}, {pool}",
                [*engine_arguments(made, pool), *ON_GPU],
                {
                    "model_path": model,
                    "served_model_name": "served",
                    "host": "0.0.0.0",
                    "port": 30000,
                    "tp_size": 2,
                    "mem_fraction_static": 0.8,
                    "enable_metrics": True,
                    "enable_cache_report": True,
                    "enable_trace": True,
                    "otlp_traces_endpoint": "collector:4317",
                    **(speculative(model, expected) if pool == "speculative" else NOT_SPECULATIVE),
                },
            )


NOT_SPECULATIVE = {"speculative_algorithm": None}


def local(model: str) -> Iterator[Case]:
    """The command lines of both servers of `dps up`, on the CPU and on a shared GPU."""
    options = SGLangOptions(model, draft_model=model)
    chain = speculative(model, SPECULATIONS["Standalone"][1])
    shares: dict[PoolName, float] = {"speculative": 0.45, "greedy": 0.8}
    for pool, share in shares.items():
        speculation = chain if pool == "speculative" else NOT_SPECULATIVE
        on_cpu = sglang_command(options, pool, Placement([]), port=31000, served_name="served")
        yield Case(
            f"dps up, {pool}, CPU",
            list(on_cpu.command[3:]),
            {"device": "cpu", "host": "127.0.0.1", "port": 31000, "mem_fraction_static": 0.3, **speculation},
        )
        shared = sglang_command(options, pool, Placement(["0"], shared=True), port=31000, served_name="m")
        yield Case(
            f"dps up, {pool}, a shared GPU",
            [*shared.command[3:], *ON_GPU],
            {"device": "cuda", "host": "127.0.0.1", "mem_fraction_static": share, **speculation},
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_sglang_parses_command_lines_as_intended(version: str, tmp_path: Path) -> None:
    install()
    model = str(tiny_model())
    cases = [*operators(model), *local(model)]
    done = subprocess.run(
        [PYTHON, HERE / "read_arguments.py", tmp_path / "read.json"],
        input=json.dumps([case.arguments for case in cases]),
        env=os.environ | {"PYTHONPATH": str(VENV / f"sglang-{version}")},
        capture_output=True,
        text=True,
        check=False,
        timeout=READ_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = json.loads((tmp_path / "read.json").read_text())
    assert {
        case.name: {name: item[name] for name in case.expected}
        for case, item in zip(cases, parsed, strict=True)
    } == {case.name: case.expected for case in cases}
