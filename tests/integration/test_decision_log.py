"""The decision log of a running gateway."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.routing.policies import POLICIES
from dps_lab.calibrate.cli import main as calibrate
from dps_lab.simulate.cli import main as simulate
from dps_lab.simulate.workloads import load_workload
from dps_testkit.data_plane import CHAT, chat, posted
from dps_testkit.processes import Engine, LocalProcesses
from tests.integration.leftovers import decisions

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


async def test_decision_log_has_lengths_decisions_and_outcomes_but_neither_prompts_nor_client_ids(
    tmp_path: Path, engines: tuple[Engine, Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.jsonl"
    before = time.time()
    async with LocalProcesses(tmp_path) as processes:
        speculative, greedy = engines
        gateway = await processes.start_gateway(
            [speculative], [greedy], {"routing": {"decisionLog": str(path), "thresholdTokens": 128}}
        )

        async def send(body: dict[str, Any]) -> tuple[int, str]:
            async with posted(gateway.url + CHAT, body, **{"x-session-id": "client-7"}) as response:
                await response.read()
                return response.status, response.headers.get("x-dps-session", "")

        status, session = await send(chat(4, stream=True))
        assert status == 200
        messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": "sky " * 400}]
        assert await send(chat(6) | {"messages": messages}) == (200, session)
        assert (await send(chat() | {"temperature": "hot"}))[0] == 400  # not answered, so not in the log
        first, second = await decisions(path, 2)
        assert await gateway.metric("dps_decision_log_dropped_total") == 0
    text = path.read_text()
    assert "hello" not in text
    assert "client-7" not in text
    for entry in (first, second):
        assert before < entry.pop("time") < time.time()
        assert entry.pop("total_seconds") > (entry.pop("first_token_seconds") or 0) >= 0
        assert entry.pop("cached_tokens") >= 0
        assert entry.pop("load") == {"speculative": 0, "greedy": 0}
        assert entry.pop("queued_prefill_tokens") == {"speculative": 0, "greedy": 0}
        assert entry.pop("predicted_seconds") is None
        assert entry.pop("changed") is None
        assert entry.pop("expected_tokens_per_verification") is None
        assert entry.pop("verifications") is None
    length, longer = first["prompt_tokens"], second["prompt_tokens"]
    assert first == {
        "session": session,
        "turn": 1,
        "history": "new",
        "prompt_tokens": length,
        "delta_tokens": length,
        "uncached_tokens": {"speculative": length, "greedy": length},
        "fetchable_tokens": {"speculative": 0, "greedy": 0},
        "pool": "speculative",
        "reason": "within_threshold",
        "output_tokens": 4,
        "fetched_tokens": 0,
    }
    assert second == {
        "session": session,
        "turn": 2,
        "history": "grown",
        "prompt_tokens": longer,
        "delta_tokens": longer - length,
        "uncached_tokens": {"speculative": longer - length, "greedy": longer},
        "fetchable_tokens": {"speculative": 0, "greedy": 0},
        "pool": "greedy",
        "reason": "over_threshold",
        "output_tokens": 6,
        "fetched_tokens": 0,
    }

    # Both commands read it as the one session that it has.
    assert simulate(["--workload", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["session_seconds"]["median"] > 0
    assert calibrate(["--workload", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"]["policy"] in POLICIES
    (trace,) = load_workload(str(path))
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in trace.turns] == [(length, 4), (longer, 6)]
