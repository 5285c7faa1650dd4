"""Derives the bundled length traces of `dps simulate`, in lab/dps_lab/data/lengths, from recorded conversations.

python -m dps_tools.make_lengths bfcl OUTPUT                BFCL multi-turn, from its PyPI package (Apache-2.0)
python -m dps_tools.make_lengths tau-bench CHECKOUT OUTPUT  tau-bench, historical_trajectories/gpt-4o-airline.json (MIT)
python -m dps_tools.make_lengths mooncake TRACE OUTPUT      Mooncake, FAST25-release/traces/conversation_trace.jsonl
                                                            (Apache-2.0)

For the first two, every prompt is rendered with Qwen2.5's chat template and counted with its tokenizer. The third
source has lengths in tokens of its own model. Only lengths and times are written.
"""

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dps_gateway.prompt.tokenizer import Tokenizer
from dps_lab.workload.assets import bfcl
from dps_lab.workload.bfcl import load_bfcl
from dps_lab.workload.sessions import Message
from dps_local.assets import qwen_tokenizer

USER = "<|im_start|>user\n"


def lengths(
    tokenizer: Tokenizer,
    session_id: str,
    prefix: str,
    tools: list[dict[str, Any]],
    steps: Iterable[tuple[list[Message], Message]],
) -> dict[str, Any]:
    """One line of the trace. steps: (messages of the prompt, assistant message that answers it) for each turn."""
    turns: list[dict[str, int]] = []
    prefix_tokens = 0
    for prompt, answer in steps:
        text = tokenizer.render(prompt, tools, {})
        whole = tokenizer.render([*prompt, answer], tools, {}, generation_prompt=False)
        assert whole.startswith(text)
        if not turns:
            prefix_tokens = tokenizer.count(text[: text.index(USER)])
        # The answer as generated ends with <|im_end|>; the newline that the template adds is not generated.
        output = whole[len(text) :].removesuffix("\n")
        turns.append({"prompt_tokens": tokenizer.count(text), "output_tokens": tokenizer.count(output)})
    return {"id": session_id, "prefix": prefix, "prefix_tokens": prefix_tokens, "turns": turns}


def bfcl_lengths(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The lines of the trace `bfcl`."""
    for session in load_bfcl(bfcl().path):
        prompts = list(session.prompts())
        steps = [(prompt, turn.answer) for prompt, turn in zip(prompts, session.turns, strict=True)]
        names = "+".join(sorted({tool["function"]["name"] for tool in session.tools}))
        yield lengths(tokenizer, session.id, names, session.tools, steps)


def tau_bench_lengths(tokenizer: Tokenizer, checkout: Path) -> Iterator[dict[str, Any]]:
    """The lines of the trace `tau-bench`, from a checkout of its repository."""
    tools = [_tool(path) for path in sorted((checkout / "tau_bench/envs/airline/tools").glob("[a-z]*.py"))]
    runs = json.loads((checkout / "historical_trajectories/gpt-4o-airline.json").read_text())
    for run in runs:
        messages = [_message(message) for message in run["traj"]]
        steps = [(messages[:index], m) for index, m in enumerate(messages) if m["role"] == "assistant"]
        yield lengths(tokenizer, f"airline_{run['task_id']}_{run['trial']}", "airline", tools, steps)


BLOCK = 512
"""Tokens of one block of the Mooncake trace. `hash_ids` has an id for each block; equal ids mean equal prefixes."""

MOONCAKE_SESSIONS = 400

Requests = list[dict[str, Any]]
"""The requests of one session, as in the trace."""


def mooncake_lengths(trace: Path) -> Iterator[dict[str, Any]]:
    """The first MOONCAKE_SESSIONS sessions with at least two turns.

    A request continues an earlier one if it begins with all of that request's complete blocks, of which there are at
    least two, and is longer by at least its answer. Of several such requests, it continues the one with the most
    blocks, and the latest of these. All of these sessions begin with the same block.
    """
    sessions: list[Requests] = []
    newest: dict[tuple[int, ...], list[Requests]] = {}
    for line in trace.read_text().splitlines():
        request = json.loads(line)
        blocks = tuple(request["hash_ids"])
        session = _continued(request, blocks, newest)
        if session is None:
            session = []
            sessions.append(session)
        session.append(request)
        newest.setdefault(blocks[: request["input_length"] // BLOCK], []).append(session)
    for number, session in enumerate([s for s in sessions if len(s) > 1][:MOONCAKE_SESSIONS]):
        assert session[0]["hash_ids"][0] == 0
        yield {
            "id": f"mooncake_{number}",
            "prefix": "first block",
            "prefix_tokens": BLOCK,
            "arrival_seconds": session[0]["timestamp"] / 1000,
            "turns": [
                {"prompt_tokens": request["input_length"], "output_tokens": request["output_length"]}
                for request in session
            ],
        }


def _continued(
    request: dict[str, Any], blocks: tuple[int, ...], newest: dict[tuple[int, ...], list[Requests]]
) -> Requests | None:
    """The session that a request continues, which is removed from `newest`."""
    for length in range(len(blocks), 1, -1):
        candidates = newest.get(blocks[:length], [])
        for session in reversed(candidates):
            last = session[-1]
            grown: int = request["input_length"] - last["input_length"]
            if grown >= last["output_length"]:
                # By identity: different sessions may have equal requests.
                candidates[:] = [other for other in candidates if other is not session]
                return session
    return None


def _tool(path: Path) -> dict[str, Any]:
    """The tool's schema: the dictionary that its `get_info` returns."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "get_info":
            (returned,) = [each.value for each in node.body if isinstance(each, ast.Return)]
            assert returned is not None
            schema: dict[str, Any] = ast.literal_eval(returned)
            return schema
    raise ValueError(f"{path} defines no tool")


def _message(message: dict[str, Any]) -> Message:
    calls = message.get("tool_calls") or []
    return {
        "role": message["role"],
        "content": message.get("content") or "",
        **(
            {
                "tool_calls": [
                    {
                        "function": {
                            "name": c["function"]["name"],
                            "arguments": json.loads(c["function"]["arguments"]),
                        }
                    }
                    for c in calls
                ]
            }
            if calls
            else {}
        ),
    }


def main(kind: str, *arguments: str) -> None:
    """Write the trace `kind` to the last of the arguments."""
    output = Path(arguments[-1])
    if kind == "mooncake":
        sessions = list(mooncake_lengths(Path(arguments[0])))
    else:
        tokenizer = Tokenizer.load(str(qwen_tokenizer().path))
        sessions = list(
            bfcl_lengths(tokenizer) if kind == "bfcl" else tau_bench_lengths(tokenizer, Path(arguments[0]))
        )
    names = {name: str(index) for index, name in enumerate(sorted({s["prefix"] for s in sessions}))}
    for session in sessions:
        session["prefix"] = f"{kind}-{names[session['prefix']]}"
    output.write_text("".join(json.dumps(session, separators=(",", ":")) + "\n" for session in sessions))
    turns = [turn for session in sessions for turn in session["turns"]]
    print(f"{len(sessions)} sessions, {len(turns)} turns, {len(names)} prefixes")


if __name__ == "__main__":
    main(*sys.argv[1:])
