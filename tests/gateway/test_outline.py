"""Where a prompt differs from an earlier one, with the chat templates of several models."""

import pytest

from dps_gateway.prompt.prefixes import Difference, Outline

TEMPLATES = {
    "Qwen": (b"<|im_start|>", "<|im_start|>{role}\n{text}<|im_end|>\n"),
    "Llama": (b"<|start_header_id|>", "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"),
    "Gemma": (b"<start_of_turn>", "<start_of_turn>{role}\n{text}<end_of_turn>\n"),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("bos", ["", "<bos>"])
def test_first_message_that_differs_has_its_role_and_offset(template: str, bos: str) -> None:
    split_token, message = TEMPLATES[template]

    def outline(*texts: str) -> Outline:
        parts = zip(("system", "user", "assistant", "user"), texts, strict=True)
        text = "".join(message.format(role=role, text=each) for role, each in parts)
        return Outline.of((bos + text).encode(), (), split_token)

    earlier = outline("be kind", "q", "a", "r").fingerprints
    second = len(bos) + len(message.format(role="system", text="be kind"))
    assert outline("be rude", "q", "a", "r").difference(earlier) == Difference(0, "system", len(bos))
    assert outline("be kind", "p", "a", "r").difference(earlier) == Difference(1, "user", second)


def test_content_is_not_taken_for_a_role() -> None:
    first, second = (
        Outline.of(text, (), b"[INST]") for text in (b"[INST]secret[INST]", b"[INST]other[INST]")
    )
    assert second.difference(first.fingerprints) == Difference(0, None, 0)


@pytest.mark.parametrize("split_token", [b"[INST]", None])
def test_difference_without_messages_is_unknown(split_token: bytes | None) -> None:
    outline = Outline.of(b"plain text", (), split_token)
    assert (outline.fingerprints, outline.difference("abcd"), outline.difference("")) == ("", None, None)
