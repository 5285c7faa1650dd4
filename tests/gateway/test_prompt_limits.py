"""The memory and the work for rendering a request are in proportion to the length of its body."""

import base64
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from dps_gateway.prompt.chat import chat_input
from dps_gateway.prompt.responses import MAX_REASONING_BYTES, chat_request
from dps_gateway.prompt.tool_schema import MAX_MIXED_TYPES, normalized_schema

MIB = 1024 * 1024


@pytest.fixture
def traced() -> Iterator[None]:
    """Record the memory that the test allocates."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def tools_input(name: str, parameters: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The chat template's tools for a request with one tool."""
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return chat_input({"messages": [{"role": "user", "content": "?"}], "tools": [tool]}, "string").tools


class TestToolListCache:
    def test_memory_of_lists_with_many_small_values_is_limited(self, traced: None) -> None:
        """An empty object needs about 25 times as much memory as its text."""
        parameters = json.loads('{"examples": [' + ",".join(["{}"] * 80_000) + "]}")
        before, _ = tracemalloc.get_traced_memory()
        for number in range(10):
            tools_input(f"f{number}", parameters)
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 50 * MIB

    def test_memory_of_all_lists_is_limited(self, traced: None) -> None:
        parameters = {"description": "x" * 200_000}
        before, _ = tracemalloc.get_traced_memory()
        for number in range(250):
            tools_input(f"g{number}", parameters)
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 40 * MIB

    def test_equal_lists_are_converted_once(self) -> None:
        assert tools_input("f", {"type": "dict"}) is tools_input("f", {"type": "dict"})


def reasoning_item(text: bytes, cut: int = 0) -> dict[str, Any]:
    """A reasoning item of the Responses API with only a state, whose compressed form lacks the last `cut` bytes."""
    compressed = zlib.compress(text)
    state = base64.urlsafe_b64encode(compressed[: len(compressed) - cut]).decode()
    return {"type": "reasoning", "encrypted_content": f"sglang-reasoning-v1.{state}"}


def reasoning_texts(items: list[dict[str, Any]]) -> list[str]:
    """The reasoning in the chat for a request to /v1/responses with these items, each followed by a question."""
    turns = [turn for item in items for turn in (item, {"role": "user", "content": "?"})]
    messages = chat_request({"input": turns}, inline_system=True)["messages"]
    return [message["reasoning_content"] for message in messages if message["role"] == "assistant"]


class TestReasoningStates:
    @pytest.mark.parametrize(
        "items",
        [[reasoning_item(bytes(64 * MIB))], [reasoning_item(bytes(MIB))] * 100],
        ids=["one long state", "many states"],
    )
    def test_states_that_become_too_long_are_refused(self, items: list[dict[str, Any]], traced: None) -> None:
        with pytest.raises(ValueError, match=r"^the reasoning states are too long$"):
            chat_request({"input": items}, inline_system=True)
        assert tracemalloc.get_traced_memory()[1] < 20 * MIB

    def test_states_up_to_the_limit_are_decoded(self) -> None:
        texts = [b"a" * (MAX_REASONING_BYTES - 1), b"b"]
        assert reasoning_texts([*map(reasoning_item, texts)]) == [text.decode() for text in texts]

    @pytest.mark.parametrize(
        "item", [reasoning_item(b"hm", cut=1), reasoning_item(b"\xff"), reasoning_item(b"hm", cut=9)]
    )
    def test_invalid_state_is_ignored(self, item: dict[str, Any]) -> None:
        assert reasoning_texts([item, reasoning_item(b"so")]) == ["so"]


class TestTypeLists:
    def test_duplicates_in_a_long_list_are_removed(self) -> None:
        """The types keep the order in which they first occur."""
        types = [f"t{number}" for number in range(200_000)]
        assert normalized_schema({"type": ["str", *types, "int32", *types, "string"]}) == {
            "type": ["string", *types, "integer"]
        }

    def test_list_with_other_values_than_strings_is_kept_if_it_is_short(self) -> None:
        assert normalized_schema({"type": ["str", {"a": 1}, {"a": 1}, 1]}) == {
            "type": ["string", {"a": 1}, 1]
        }
        with pytest.raises(ValueError, match=r"^a type list is too long$"):
            normalized_schema({"type": [1] * (MAX_MIXED_TYPES + 1)})
