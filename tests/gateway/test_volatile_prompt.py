"""Parts of system prompts that change with every request are removed, and nothing else is."""

import copy
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.config import Model
from dps_gateway.prompt.volatile import without_volatile_parts

DEFAULT = Model(name="m", tokenizer="t").volatile_prompt
HEADER = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
PROMPT = "You are Claude Code."


def text(content: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": content}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"system": [text(HEADER), text(PROMPT)]}, {"system": [text(PROMPT)]}),
        ({"system": f"{HEADER}\n{PROMPT}"}, {"system": PROMPT}),
        ({"system": [text(f"{HEADER}\n\n{PROMPT}")]}, {"system": [text(PROMPT)]}),
        ({"instructions": f"{HEADER}\n{PROMPT}"}, {"instructions": PROMPT}),
        *(
            ({field: [{"role": role, "content": before}]}, {field: [{"role": role, "content": after}]})
            for field in ("messages", "input")
            for role in ("system", "developer")
            for before, after in (
                (f"{HEADER}\n{PROMPT}", PROMPT),
                (HEADER, ""),
                ([text(HEADER), text(PROMPT)], [text(PROMPT)]),
                ([text(HEADER, "input_text"), text(PROMPT, "input_text")], [text(PROMPT, "input_text")]),
            )
        ),
    ],
)
def test_claude_codes_header_is_removed_from_every_kind_of_system_prompt(
    body: dict[str, Any], expected: dict[str, Any]
) -> None:
    sent = copy.deepcopy(body)
    assert without_volatile_parts(body, DEFAULT) == (expected, 1)
    assert body == sent


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": None, "messages": None, "input": "text"},
        {"system": [HEADER, {"type": "text"}, {"type": "image", "text": HEADER}], "instructions": 1},
        {"system": f"Never send {HEADER}"},
        {"system": f"{PROMPT}\n{HEADER}"},
        {"messages": ["text", {"role": "user", "content": HEADER}, {"role": "system"}]},
        {"input": [{"role": "user", "content": [text(HEADER, "input_text")]}, {"type": "function_call"}]},
        {"prompt": HEADER},
    ],
)
def test_other_texts_and_invalid_requests_are_kept(body: dict[str, Any]) -> None:
    cleaned, removed = without_volatile_parts(body, DEFAULT)
    assert cleaned is body
    assert removed == 0


def test_patterns_replace_the_default_and_apply_anywhere_in_a_text() -> None:
    patterns = [re.compile(r"Today's date: [^\n]*\n"), re.compile("(?m)^Status:(\n  .*)*")]
    body = {"system": f"{HEADER}\nToday's date: Fri Nov 27 2026\nStatus:\n  M a.py\n  M b.py\nend"}
    assert without_volatile_parts(body, patterns) == ({"system": f"{HEADER}\n\nend"}, 1)
    assert without_volatile_parts(body, []) == (body, 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=5) | st.sampled_from([HEADER, PROMPT]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "role", "content", "system", "messages", "input", "instructions"]
            ),
            values | st.sampled_from(["text", "system", "developer", "user"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(
    body=st.dictionaries(
        st.sampled_from(["system", "messages", "input", "instructions", "tools"]), json_values
    )
)
def test_any_request_is_cleaned_completely_and_only_if_it_has_a_match(body: dict[str, Any]) -> None:
    before = orjson.dumps(body)
    cleaned, removed = without_volatile_parts(body, DEFAULT)
    assert orjson.dumps(body) == before
    assert (cleaned is body) == (removed == 0)
    assert without_volatile_parts(cleaned, DEFAULT) == (cleaned, 0)
