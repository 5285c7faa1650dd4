"""The memory and the work for rendering a request are in proportion to the length of its body."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from dps_gateway.prompt.chat import chat_input

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
