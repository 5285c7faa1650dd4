"""The memory and the work for rendering a request are in proportion to the length of its body."""

import base64
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.prompt.chat import MAX_MIXED_TYPES, chat_input, normalized_schema
from dps_gateway.prompt.renderer import PromptRenderer
from dps_gateway.prompt.responses import MAX_REASONING_BYTES, chat_request
from dps_testkit.tokenizers import shared_tokenizer

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


class TestMergedMessages:
    """Consecutive items of the assistant are one message of the chat."""

    @staticmethod
    def merged(items: list[dict[str, Any]]) -> dict[str, Any]:
        (message,) = chat_request({"input": items}, inline_system=True)["messages"]
        return dict(message)

    def test_many_calls_are_one_message(self) -> None:
        calls = [{"type": "function_call", "name": "f", "call_id": str(number)} for number in range(300_000)]
        merged = self.merged(calls)["tool_calls"]
        assert [call["id"] for call in merged] == [call["call_id"] for call in calls]

    def test_reasoning_belongs_to_the_message_after_it_whatever_its_phase(self) -> None:
        reasoning = [{"type": "reasoning", "summary": [{"text": text}]} for text in ("hm", "so")]
        message = {"role": "assistant", "content": "a", "phase": "final_answer"}
        assert self.merged([*reasoning, message]) == message | {"reasoning_content": "hm\nso"}


def media_chat(texts: list[str]) -> list[dict[str, Any]]:
    """Messages with a text and an image each."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    return [{"role": "user", "content": [{"type": "text", "text": text}, image]} for text in texts]


def offsets_of(renderer: PromptRenderer, messages: list[dict[str, Any]]) -> list[int]:
    """The offsets of the media in the chat's prompt."""
    return [offset for offset, _ in renderer.chat({"messages": messages}).marks]


class TestMediaOffsets:
    """Media are at the offset in the prompt where the text of their message starts."""

    @given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=5))
    def test_offsets_are_those_of_the_messages(self, texts: list[str]) -> None:
        numbered = [f"<{number}>{text}" for number, text in enumerate(texts)]
        renderer = PromptRenderer(shared_tokenizer())
        data = renderer.chat({"messages": media_chat(numbered)}).data
        expected, start = [], 0
        for text in numbered:
            start = data.index(text.encode(), start)
            expected.append(start)
        assert offsets_of(renderer, media_chat(numbered)) == expected

    def test_many_messages(self) -> None:
        messages = media_chat([f"<{number}>" for number in range(150_000)])
        offsets = offsets_of(PromptRenderer(shared_tokenizer()), messages)
        assert len(set(offsets)) == len(messages)

    def test_text_that_looks_like_a_sentinel_puts_all_media_at_the_start(self) -> None:
        renderer = PromptRenderer(shared_tokenizer())
        assert offsets_of(renderer, media_chat(["\x00media 0\x00", "b"])) == [0, 0]
