"""`dps calibrate`: its options, its output, and its errors for invalid input."""

import json
from pathlib import Path

import pytest
import yaml

from dps_lab.calibrate.cli import main, sample
from dps_lab.simulate.run import Load
from dps_lab.simulate.trace import SessionTrace, TurnLengths


def test_json_has_the_documented_keys(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", str(trace_file), "--concurrency", "3", "--gpus", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    keys = "objective limits limits_met choice alternatives flat_thresholds budget verdict runs"
    assert report.keys() == set(keys.split())
    assert report["choice"].keys() == {"speculative", "greedy", "policy", "threshold_tokens", "figures"}
    assert report["choice"]["speculative"] + report["choice"]["greedy"] == 2


def test_the_recommendation_fits_into_a_termination_message(trace_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "recommendation.json"
    options = ["--workload", str(trace_file), "--fleet", "speculative=1,greedy=1", "--objective", "ttft"]
    assert main([*options, "--recommendation", str(path)]) == 0
    assert path.stat().st_size <= 4096
    written = json.loads(path.read_text())
    assert written.keys() - {"thresholdTokens"} == {"policy", "objective", "seconds", "verdict"}
    assert (written["objective"], written["seconds"] > 0) == ("ttft", True)


def test_the_recommendation_for_a_budget_has_a_split_with_both_pools_and_the_ratio_of_their_loads(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recommendation.json"
    options = ["--workload", str(trace_file), "--budget", "3", "--cooldown", "1", "--json"]
    assert main([*options, "--recommendation", str(path)]) == 0
    found = json.loads(path.read_text())["gpuBudget"]
    assert found["speculativeReplicas"] + found["greedyReplicas"] == 3
    assert min(found["speculativeReplicas"], found["greedyReplicas"]) >= 1
    assert found["loadRatio"] == json.loads(capsys.readouterr().out)["budget"]["load_ratio"]


def test_a_fixed_fleet_keeps_its_split_in_the_patch(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--workload", str(trace_file), "--fleet", "speculative=1,greedy=1", "--patch"]) == 0
    spec = yaml.safe_load(capsys.readouterr().out)["spec"]
    assert spec["pools"] == {"speculative": {"replicas": 1}, "greedy": {"replicas": 1}}


@pytest.mark.parametrize("output", [[], ["--patch"]], ids=["table", "patch"])
def test_nothing_is_recommended_or_patched_if_no_set_up_meets_the_limits(
    output: list[str], trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recommendation = tmp_path / "recommendation.json"
    fleet = ["--fleet", "speculative=1,greedy=1", "--max-tpot", "1e-6"]
    arguments = ["--workload", str(trace_file), *fleet, *output]
    assert main([*arguments, "--recommendation", str(recommendation)]) == 1
    captured = capsys.readouterr()
    assert ("No set-up meets the limits." in captured.out) is (not output)
    assert not output or captured.out == ""
    assert "nothing is recommended" in captured.err
    assert not recommendation.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workload toolbench --concurrency 1 --fleet adaptive=2", "adaptive engines are not searched"),
        ("--workload toolbench --concurrency 1 --hardware a100-70b", "choose a multiple of 4"),
        ("--workload toolbench --concurrency 1 --one-gpu", "add --fleet speculative=1,greedy=1"),
    ],
)
def test_invalid_input_exits_with_2_and_an_actionable_message(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_engines_that_share_a_gpu_are_compared_with_one_engine_alone(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workload", str(trace_file), "--concurrency", "6", "--fleet", "speculative=1,greedy=1"]
    assert main([*arguments, "--one-gpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["choice"]["policy"] in ("AlwaysSpeculative", "AlwaysGreedy")
    alone = {each["name"]: each for each in result["alternatives"]}
    assert [alone["greedy only"][pool] for pool in ("speculative", "greedy")] == [0, 1]
    assert [alone["always speculative"][pool] for pool in ("speculative", "greedy")] == [1, 0]
    assert result["verdict"].startswith("Two pools gain little")


def session(number: int, arrival: float | None = None) -> SessionTrace:
    return SessionTrace(
        id=f"s{number}", arrival_seconds=arrival, turns=[TurnLengths(prompt_tokens=5, output_tokens=5)]
    )


def test_a_sample_of_recorded_arrivals_is_the_first_sessions_so_that_their_rate_is_kept() -> None:
    workload = [session(number, arrival=10.0 - number) for number in range(10)]
    assert [each.id for each in sample(workload, 3, Load())] == ["s9", "s8", "s7"]


def test_a_sample_for_another_load_is_random_and_in_order() -> None:
    workload = [session(number) for number in range(10)]
    chosen = sample(workload, 4, Load(concurrency=1))
    assert len({each.id for each in chosen}) == 4
    assert [each.id for each in chosen] == sorted(each.id for each in chosen)
    assert sample(workload, None, Load(concurrency=1)) == workload
