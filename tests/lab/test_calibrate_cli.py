"""`dps calibrate`: its options, its output, and its errors for invalid input."""

import json
from pathlib import Path

import pytest
import yaml

from dps_gateway.config import load_config
from dps_lab.calibrate.cli import main, sample
from dps_lab.simulate.run import Load
from dps_lab.simulate.trace import SessionTrace, TurnLengths

CONFIGURATION = """\
model: {name: sample, tokenizer: ./tokenizer}
pools:
  speculative: {endpoints: ["http://127.0.0.1:30000"]}
  greedy: {endpoints: ["http://127.0.0.1:30001"]}
"""


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "id": f"s{n}",
            "arrival_seconds": n / 4,
            "turns": [{"prompt_tokens": 500 + (90 + 7 * n) * t, "output_tokens": 20} for t in range(3)],
        }
        for n in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_json_has_the_documented_keys(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", str(trace_file), "--concurrency", "3", "--gpus", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "objective",
        "limits",
        "limits_met",
        "choice",
        "alternatives",
        "flatness",
        "verdict",
        "runs",
    }
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


def test_a_budget_of_one_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--budget", "1"])
    assert "at least 2" in capsys.readouterr().err


def test_nothing_is_recommended_if_no_set_up_meets_the_limits(trace_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "recommendation.json"
    options = ["--workload", str(trace_file), "--max-tpot", "0.000001"]
    assert main([*options, "--recommendation", str(path)]) == 1
    assert not path.exists()


def test_no_patch_is_printed_if_no_set_up_meets_the_limits(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--workload", str(trace_file), "--fleet", "speculative=1,greedy=1", "--max-ttft-p95", "1e-6"]
    assert main([*options, "--patch"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("load", [["--rate", "3"], ["--concurrency", "3"], []], ids=" ".join)
def test_every_kind_of_load_prints_a_table_and_a_verdict(
    load: list[str], trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--workload", str(trace_file), *load]) == 0
    output = capsys.readouterr().out
    assert "choice" in output
    assert "Two pools" in output


def test_one_gpu_has_no_verdict_on_two_pools(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", str(trace_file), "--gpus", "1"]) == 0
    assert "Two pools were not compared" in capsys.readouterr().out


def test_a_fixed_fleet_keeps_its_split_and_is_patched_and_applied_and_drawn(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = tmp_path / "gateway.yaml"
    configuration.write_text(CONFIGURATION)
    plot = tmp_path / "plots" / "calibration.png"
    arguments = ["--workload", str(trace_file), "--fleet", "speculative=1,greedy=1", "--patch"]
    assert main([*arguments, "--apply", str(configuration), "--plot", str(plot)]) == 0
    spec = yaml.safe_load(capsys.readouterr().out)["spec"]
    assert spec["pools"] == {"speculative": {"replicas": 1}, "greedy": {"replicas": 1}}
    assert load_config(configuration).routing.policy == spec["routing"]["policy"]
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_limits_that_cannot_be_met_exit_with_1_and_apply_nothing(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = tmp_path / "gateway.yaml"
    configuration.write_text(CONFIGURATION)
    arguments = ["--workload", str(trace_file), "--max-ttft-p95", "1e-6", "--apply", str(configuration)]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "No set-up meets the limits." in captured.out
    assert "nothing was applied" in captured.err
    assert configuration.read_text() == CONFIGURATION


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nothing.jsonl"], "there is no workload and no file 'nothing.jsonl'"),
        (["--workload", "toolbench"], "set --concurrency C or --rate R"),
        (
            ["--workload", "toolbench", "--concurrency", "1", "--fleet", "adaptive=2"],
            "adaptive engines are not searched",
        ),
        (
            ["--workload", "toolbench", "--concurrency", "1", "--hardware", "a100-70b"],
            "--gpus 2: an engine of a100-70b takes 4 GPUs; choose a multiple of 4",
        ),
        (
            ["--workload", "toolbench", "--concurrency", "1", "--one-gpu"],
            "--one-gpu requires the engines that share the GPU; add --fleet speculative=1,greedy=1",
        ),
    ],
)
def test_invalid_input_exits_with_2_and_an_actionable_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
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


@pytest.mark.parametrize("search", [[], ["--exhaustive"]], ids=["pruned", "exhaustive"])
def test_a_workload_whose_turns_are_all_equally_long_is_calibrated(
    search: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(session(number).model_dump_json() for number in range(3)))
    assert main(["--workload", str(path), "--concurrency", "2", "--json", *search]) == 0
    assert json.loads(capsys.readouterr().out)["choice"]["threshold_tokens"] is None


@pytest.mark.parametrize("goal", [["--objective", "tpot"], ["--max-tpot", "1"]], ids=" ".join)
def test_answers_of_one_token_have_no_time_per_token_after_the_first(
    goal: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"id": "a", "turns": [{"prompt_tokens": 9, "output_tokens": 1}]}')
    assert main(["--workload", str(path), "--concurrency", "1", *goal]) == 2
    assert "no answer has more than one token" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "routing: {policy: 7}"], ids=["missing", "invalid"])
def test_a_configuration_that_cannot_be_applied_is_reported_before_the_search(
    text: str | None, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.yaml"
    if text is not None:
        path.write_text(text)
    plot = tmp_path / "plot.png"
    assert main(["--workload", str(trace_file), "--apply", str(path), "--plot", str(plot)]) == 2
    assert "gateway.yaml" in capsys.readouterr().err
    assert not plot.exists()


def session(number: int, arrival: float | None = None) -> SessionTrace:
    return SessionTrace(
        id=f"s{number}", arrival_seconds=arrival, turns=[TurnLengths(prompt_tokens=5, output_tokens=5)]
    )


def test_a_sample_of_recorded_arrivals_is_the_first_sessions_so_that_their_rate_is_kept() -> None:
    workload = [session(number, arrival=10.0 - number) for number in range(10)]
    assert [each.id for each in sample(workload, 3, Load(), 0)] == ["s9", "s8", "s7"]


def test_a_sample_for_another_load_is_random_and_in_order() -> None:
    workload = [session(number) for number in range(10)]
    chosen = sample(workload, 4, Load(concurrency=1), 0)
    assert len({each.id for each in chosen}) == 4
    assert [each.id for each in chosen] == sorted(each.id for each in chosen)
    assert sample(workload, None, Load(concurrency=1), 0) == workload
