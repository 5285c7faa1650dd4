"""The command line of `dps up`: what goes together, and what follows `--`."""

import pytest

from dps_local.up import parse

SGLANG = ["--engine", "sglang", "--model", "m"]
URLS = ["--speculative-url", "http://a:1", "--greedy-url", "http://b:1"]

REFUSED = {
    "one URL": (URLS[:2], "--speculative-url and --greedy-url go together"),
    "URLs and engines to start": ([*URLS, *SGLANG], "name some that run already"),
    "no URL": (["--speculative-url", "a:1", "--greedy-url", "b:1"], "a:1 is no URL, such as http://"),
    "no model": (["--engine", "sglang"], "--engine sglang needs --model, a hub id or a folder"),
    "no draft model": (SGLANG, "--algorithm Standalone needs --draft-model; pass it, or choose Ngram"),
    "arguments of SGLang for emulated engines": (
        ["--", "--log-level"],
        "what follows -- is for --engine sglang",
    ),
    "an unknown option": (["--no-such"], "unrecognized arguments: --no-such"),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_follows_two_dashes_is_for_sglang() -> None:
    argv = [*SGLANG, "--algorithm", "Ngram", "--", "--log-level", "debug", "--disable-radix-cache"]
    assert parse(argv).engine_arguments == ["--log-level", "debug", "--disable-radix-cache"]


def test_a_url_is_taken_with_and_without_the_path_of_the_api() -> None:
    read = parse(["--speculative-url", "http://a:1/v1", "--greedy-url", "http://b:1/"])
    assert (read.speculative_url, read.greedy_url) == ("http://a:1", "http://b:1")
