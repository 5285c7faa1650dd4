"""Ten turns of coding agents, in the shapes in which their requests arrive: Claude Code, OpenCode and Codex."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, Gateway, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

TURNS = 10
RULES = "You are a careful coding agent. " * 30
CONTENT = "def main(): return 1\n" * 20
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    async with LocalProcesses(tmp_path_factory.mktemp("agents")) as processes:
        yield await processes.start_gateway([engines[0]], [engines[1]])


@dataclass
class ClaudeCode:
    """Anthropic's Messages API. The first system text differs in every request, and so does the cache's marker."""

    path = "/v1/messages"
    session_header = "x-claude-code-session-id"
    rules: str = RULES
    messages: list[dict[str, Any]] = field(default_factory=list)

    def body(self, turn: int) -> dict[str, Any]:
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={uuid4().hex[:5]};"
        )
        cached = {"cache_control": {"type": "ephemeral"}}
        if turn == 0:
            reminder = "<system-reminder>\nThe current date is 2026-11-27.\n</system-reminder>"
            texts = [{"type": "text", "text": text} for text in (reminder, "Fix the test.")]
            self.messages.append({"role": "user", "content": texts})
        else:
            call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {"path": f"/{turn}"}}
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": CONTENT}
            self.messages += [
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
                {"role": "user", "content": [result]},
            ]
        *earlier, last = self.messages
        marked = [*last["content"][:-1], last["content"][-1] | cached]
        return {
            "model": MODEL,
            "max_tokens": 8,
            "metadata": {"user_id": "user_1_account__session_2"},
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": self.rules, **cached}],
            "tools": [{"name": "Read", "description": "Reads a file", "input_schema": SCHEMA}],
            "messages": [*earlier, last | {"content": marked}],
        }


@dataclass
class OpenCode:
    """OpenAI's chat API through the AI SDK. The system prompt has the environment and the date."""

    path = "/v1/chat/completions"
    session_header = "x-opencode-session"
    rules: str = RULES
    messages: list[dict[str, Any]] = field(default_factory=list)

    def body(self, turn: int) -> dict[str, Any]:
        if turn == 0:
            env = "<env>\n  Working directory: /src\n  Today's date: Fri Nov 27 2026\n</env>"
            self.messages += [
                {"role": "system", "content": f"{self.rules}\n{env}"},
                {"role": "user", "content": "Fix the test."},
            ]
        else:
            function = {"name": "read", "arguments": f'{{"path":"/{turn}"}}'}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            self.messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call_{turn}", "content": CONTENT},
            ]
        read = {"name": "read", "description": "Reads a file", "parameters": SCHEMA}
        return {
            "model": MODEL,
            "max_tokens": 8,
            "stream_options": {"include_usage": True},
            "messages": list(self.messages),
            "tools": [{"type": "function", "function": read}],
            "tool_choice": "auto",
        }


@dataclass
class Codex:
    """OpenAI's Responses API without stored responses: every request has the whole history as input items."""

    path = "/v1/responses"
    session_header = "session_id"
    rules: str = RULES
    items: list[dict[str, Any]] = field(default_factory=list)

    def body(self, turn: int) -> dict[str, Any]:
        def message(text: str) -> dict[str, Any]:
            return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

        if turn == 0:
            self.items += [
                message("<environment_context>\n<cwd>/src</cwd>\n</environment_context>"),
                message("Fix."),
            ]
        else:
            arguments = f'{{"path":"/{turn}"}}'
            call = {
                "type": "function_call",
                "name": "shell",
                "arguments": arguments,
                "call_id": f"call_{turn}",
            }
            output = {"type": "function_call_output", "call_id": f"call_{turn}", "output": CONTENT}
            self.items += [call, output]
        shell = {
            "type": "function",
            "name": "shell",
            "description": "Runs",
            "strict": False,
            "parameters": SCHEMA,
        }
        return {
            "model": MODEL,
            "instructions": self.rules,
            "input": list(self.items),
            "tools": [shell],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "include": [],
            "max_output_tokens": 8,
        }


Agent = ClaudeCode | OpenCode | Codex


@pytest.mark.parametrize("kind", [ClaudeCode, OpenCode, Codex])
@pytest.mark.parametrize("identified", [True, False])
async def test_ten_turns_of_an_agent_grow_one_session(
    gateway: Gateway, kind: type[Agent], identified: bool
) -> None:
    """Agents send a session id, but a proxy on the way may drop its header."""
    agent, found = kind(), list[Mapping[str, str]]()
    agent.rules += str(identified)
    headers = {agent.session_header: str(uuid4())} if identified else {}
    async with aiohttp.ClientSession() as http:
        for turn in range(TURNS):
            body = agent.body(turn) | {"stream": True}
            async with http.post(gateway.url + agent.path, json=body, headers=headers) as response:
                text = await response.text()
                assert response.status == 200, text
                found.append(response.headers)
    lengths = [int(headers["x-dps-prompt-tokens"]) for headers in found]
    assert [headers["x-dps-history"] for headers in found] == ["new"] + ["grown"] * (TURNS - 1)
    assert len({headers["x-dps-session"] for headers in found}) == 1
    growth = [later - earlier for earlier, later in zip([0, *lengths], lengths, strict=False)]
    assert [int(headers["x-dps-delta-tokens"]) for headers in found] == growth
    assert lengths[0] > 200
    assert max(growth[1:]) - min(growth[1:]) <= 4  # ids with one digit more
    assert await gateway.metric("dps_token_count_mismatch_total") == 0
