"""`dps simulate`: its options, its JSON, and its errors for invalid input."""

import json
from pathlib import Path

import pytest

from dps_lab.simulate.cli import main
from dps_lab.simulate.trace import SessionTrace, TurnLengths
from dps_lab.simulate.workloads import WORKLOADS, Mixture, load_workload, mixed

KEYS = (
    "batch_seconds gpus session_seconds time_to_first_token_seconds time_per_token_seconds tokens_per_second "
    "speculative_share moved_share regret"
)


def test_json_has_exactly_the_documented_keys(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", str(trace_file), "--fleet", "speculative=1,greedy=1", "--one-gpu"]
    arguments += ["--cache", "common", "--policy", "DeltaPrefill", "--threshold", "128", "--concurrency", "2"]
    assert main([*arguments, "--speculation", "serialized", "--replicas", "2", "--seed", "7", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report.keys() == set(KEYS.split())
    for spread in ("session_seconds", "time_to_first_token_seconds"):
        assert report[spread].keys() == {"mean", "median", "p95"}
    assert report["gpus"] == 1
    assert report["speculative_share"] == pytest.approx(10 / 15)


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


def test_comparison_has_every_fleet_at_every_load_and_marks_the_fastest(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = ["--workload", str(trace_file), "--compare", "2,5", "--cache", "common", "--seeds", "2"]
    assert main([*compared, "--acceptance", "0.2=1,0.9=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "2 greedy",
        "2 speculative",
        "2 adaptive drafts",
        "1 + 1, DeltaPrefill, τ = 128",
        "1 + 1, Sticky",
        "1 + 1, Adaptive",
        "1 adaptive drafts + 1, Adaptive",
    ]
    assert all(list(reports) == ["2", "5"] for reports in found.values())
    assert main([*compared, "--acceptance", "0.2=1,0.9=4"]) == 0
    printed = capsys.readouterr().out
    assert f"{min(reports['2']['batch_seconds'] for reports in found.values()):,.2f}*" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing.jsonl", "there is no workload and no file 'nothing.jsonl'; choose bfcl"),
        ("toolbench", "set --concurrency C or --rate R"),
        ("toolbench --concurrency 1 --fleet x=1", "'x' is not a kind of engine"),
        (
            "toolbench --concurrency 1 --draft-tokens-by-batch [[1,8,3]]",
            "--draft-tokens-by-batch requires adaptive engines, such as --fleet adaptive=2",
        ),
        ("toolbench --concurrency 1 --applications", "add --acceptance, such as --acceptance 0.35=1,0.85=3"),
        ("toolbench --concurrency 1 --acceptance-length 9", "an acceptance length of 9 is impossible"),
    ],
)
def test_invalid_input_exits_with_2_and_an_actionable_message(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--workload", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--concurrency", "0", "'0' is not a whole number above 0"),
        ("--compare", "1,x", "'x' is not a whole number above 0"),
        ("--acceptance", "0.5=1,1.2", "a probability that is not from 0 to 1"),
        ("--acceptance", "high", "could not convert string to float"),
        ("--draft-tokens-by-batch", "3", "3: not a JSON list of [first batch size, last batch size, draft"),
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


def test_mixture_assigns_exact_shares_at_random_and_replaces_the_acceptance_of_turns() -> None:
    turn = TurnLengths(prompt_tokens=10, output_tokens=1, acceptance=0.1)
    sessions = [SessionTrace(id=f"s{number}", turns=[turn]) for number in range(8)]
    drawn = [
        [each.turns[0].acceptance or 0.0 for each in mixed(sessions, {(0.3,): 1, (0.9,): 3}, seed)]
        for seed in (0, 0, 1)
    ]
    assert [sorted(each) for each in drawn] == [[0.3] * 2 + [0.9] * 6] * 3
    assert drawn[0] == drawn[1] != drawn[2]


def test_parts_of_a_session_can_differ_in_acceptance() -> None:
    sessions = [
        SessionTrace(id=f"s{count}", turns=[TurnLengths(prompt_tokens=10, output_tokens=1)] * count)
        for count in (1, 2, 5)
    ]
    found = [[turn.acceptance for turn in each.turns] for each in mixed(sessions, {(0.3, 0.9): 1}, 0)]
    assert found == [[0.3], [0.3, 0.9], [0.3, 0.3, 0.3, 0.9, 0.9]]


def test_only_sessions_of_the_same_application_share_their_system_prompt() -> None:
    turn = TurnLengths(prompt_tokens=10, output_tokens=1)
    sessions = [SessionTrace(id=f"s{n}", prefix=None if n < 4 else "tools", turns=[turn]) for n in range(8)]
    mixture: Mixture = {(0.3,): 1.0, (0.9,): 1.0}
    assert {each.prefix for each in mixed(sessions, mixture, 0)} == {None, "tools"}
    kinds = {
        (each.prefix, each.turns[0].acceptance) for each in mixed(sessions, mixture, 0, applications=True)
    }
    assert kinds <= {(f"{tools} {share}", p) for tools in ("", "tools") for share, p in enumerate((0.3, 0.9))}
    assert len(kinds) > 2
