"""The command line of `dps up`: options that depend on each other, and arguments after `--`."""

import pytest

from dps_local.up import parse

SGLANG = ["--engine", "sglang", "--model", "m"]
URLS = ["--speculative-url", "http://a:1", "--greedy-url", "http://b:1"]

INVALID = {
    "one URL": (URLS[:2], "--speculative-url and --greedy-url must be used together"),
    "URLs and engines to start": ([*URLS, *SGLANG], "cannot be combined with --speculative-url"),
    "URLs and a common prefix cache": (
        [*URLS, "--prefix-cache", "common"],
        "--prefix-cache common cannot be combined with --speculative-url",
    ),
    "no URL": (["--speculative-url", "a:1", "--greedy-url", "b:1"], "a:1 is not a URL such as http://"),
    "no model": (["--engine", "sglang"], "--engine sglang requires --model, a Hub id or folder"),
    "no draft model": (SGLANG, "--algorithm Standalone requires --draft-model; only Ngram works without"),
    "SGLang arguments for emulated engines": (
        ["--", "--log-level"],
        "arguments after -- require --engine sglang",
    ),
    "unknown option": (["--no-such"], "unrecognized arguments: --no-such"),
}


@pytest.mark.parametrize(("argv", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_command_line_is_rejected(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments_after_two_dashes_are_passed_to_sglang() -> None:
    argv = [*SGLANG, "--algorithm", "Ngram", "--", "--log-level", "debug", "--disable-radix-cache"]
    assert parse(argv).engine_arguments == ["--log-level", "debug", "--disable-radix-cache"]


def test_engine_url_may_include_the_api_path() -> None:
    read = parse(["--speculative-url", "http://a:1/v1", "--greedy-url", "http://b:1/"])
    assert (read.speculative_url, read.greedy_url) == ("http://a:1", "http://b:1")
