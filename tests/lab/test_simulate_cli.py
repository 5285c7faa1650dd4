"""`dps simulate`: its options, its JSON, and its errors for invalid input."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dps_lab.simulate.cli import main
from dps_lab.simulate.workloads import WORKLOADS, load_workload

KEYS = {
    "batch_seconds",
    "gpus",
    "session_seconds",
    "time_to_first_token_seconds",
    "tokens_per_second",
    "speculative_share",
    "moved_share",
    "regret",
}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    turns = [{"prompt_tokens": 500 + 90 * n, "output_tokens": 20, "think_seconds": 0} for n in range(3)]
    lines = [
        {"id": f"s{n}", "prefix": "p", "prefix_tokens": 400, "arrival_seconds": n / 2, "turns": turns}
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_json_has_exactly_the_documented_keys(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", str(trace_file), "--fleet", "speculative=1,greedy=1", "--one-gpu"]
    arguments += ["--cache", "common", "--policy", "DeltaPrefill", "--threshold", "128", "--concurrency", "2"]
    assert main([*arguments, "--speculation", "serialized", "--replicas", "2", "--seed", "7", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report.keys() == KEYS
    assert (
        report["session_seconds"].keys() == report["time_to_first_token_seconds"].keys() == {"median", "p95"}
    )
    assert report["gpus"] == 1
    assert report["speculative_share"] == pytest.approx(10 / 15)


@pytest.mark.parametrize(
    "load",
    [["--rate", "3"], ["--rate", "3", "--arrivals", "daily"], ["--concurrency", "3"], []],
    ids=" ".join,
)
def test_every_kind_of_load_prints_a_table(
    load: list[str], trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--workload", str(trace_file), *load]) == 0
    assert "5 sessions, 15 turns" in capsys.readouterr().out


def test_draft_tokens_by_batch_are_those_of_the_adaptive_engines(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for table in ("[[1,64,7]]", "[[1,64,0]]"):
        options = ["--fleet", "adaptive=1", "--draft-tokens-by-batch", table, "--acceptance-length", "4"]
        assert main(["--workload", str(trace_file), "--concurrency", "2", "--json", *options]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["batch_seconds"])
    with_drafts, without_drafts = seconds
    assert with_drafts < without_drafts


def test_equal_seeds_print_equal_figures(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        main(["--workload", str(trace_file), "--rate", "1", "--policy", "Random", "--seed", seed, "--json"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nothing.jsonl"], "there is no workload and no file 'nothing.jsonl'; choose bfcl"),
        (["--workload", "toolbench"], "set --concurrency C or --rate R"),
        (["--workload", "toolbench", "--concurrency", "1", "--fleet", "x=1"], "'x' is not a kind of engine"),
        (
            [
                "--workload",
                "toolbench",
                "--concurrency",
                "1",
                "--fleet",
                "adaptive=1",
                "--algorithm",
                "NGRAM",
            ],
            "adaptive engines vary their draft steps, of which NGRAM has none",
        ),
        (
            ["--workload", "toolbench", "--concurrency", "1", "--draft-tokens-by-batch", "[[1,8,3]]"],
            "--draft-tokens-by-batch requires adaptive engines, such as --fleet adaptive=2",
        ),
        (
            ["--workload", "toolbench", "--concurrency", "1", "--arrivals", "bursts"],
            "--arrivals bursts needs a mean rate; add --rate R",
        ),
        (
            ["--workload", "toolbench", "--concurrency", "1", "--acceptance-length", "9"],
            "an acceptance length of 9 is impossible with STANDALONE",
        ),
        (
            ["--workload", "toolbench", "--concurrency", "1", "--fleet", "greedy=9", "--one-gpu"],
            "use fewer engines per GPU",
        ),
    ],
)
def test_invalid_input_exits_with_2_and_an_actionable_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--concurrency", "0", "'0' is not a whole number above 0"),
        ("--rate", "inf", "'inf' is not a number above 0"),
        ("--threshold", "-1", "'-1' is not a number of tokens, at least 0, or 'none'"),
        ("--draft-tokens-by-batch", "3", "3: not a JSON list of [first batch size, last batch size, draft"),
        (
            "--draft-tokens-by-batch",
            "[[2,8,3]]",
            "[[2,8,3]]: the first range must begin at a batch size of 1",
        ),
    ],
)
def test_an_option_out_of_range_is_refused(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--workload", "toolbench", f"{option}={value}"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sessions", "turns"),
    [("bfcl", 800, 3336), ("tau-bench", 200, 2454), ("mooncake", 400, 1283), ("toolbench", 150, 592)],
)
def test_bundled_workloads_have_their_documented_size(name: str, sessions: int, turns: int) -> None:
    workload = load_workload(name)
    assert name in WORKLOADS
    assert (len(workload), sum(len(session.turns) for session in workload)) == (sessions, turns)


def test_share_of_bfcl_turns_with_a_delta_of_at_most_128_matches_the_paper() -> None:
    lengths = [[0, *(turn.prompt_tokens for turn in session.turns)] for session in load_workload("bfcl")]
    deltas = [later - earlier for session in lengths for earlier, later in pairwise(session)]
    assert sum(delta <= 128 for delta in deltas) / len(deltas) == pytest.approx(0.72, abs=0.01)
