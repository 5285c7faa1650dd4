"""The command line of `dps engine`."""

from dataclasses import replace
from pathlib import Path

import pytest

from dps_local.emulated_sglang.flags import parse
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel


@pytest.fixture
def tokenizer(tmp_path: Path) -> list[str]:
    return ["--tokenizer-path", str(tmp_path)]


def test_defaults_emulate_a_greedy_engine_on_an_a100(tokenizer: list[str]) -> None:
    settings = parse(tokenizer)
    assert replace(settings, arguments={}) == EngineSettings(tokenizer[1], enable_cache_report=False)


def test_flags_are_parsed_to_settings(tokenizer: list[str]) -> None:
    flags = (
        "--host 127.0.0.2 --port 31000 --model-path m --served-model-name s --api-key k --context-length 100 "
        "--max-running-requests 7 --max-total-tokens 1000 --enable-cache-report --random-seed 3 "
        "--speculative-algorithm STANDALONE --speculative-num-steps 5 --speculative-eagle-topk 2 "
        "--speculative-num-draft-tokens 8 --emulate-prefill-tokens-per-second 500 "
        "--emulate-decode-step-seconds 0.02 0.001 --emulate-draft-step-seconds 0.003 "
        "--emulate-acceptance-length 3.5 --emulate-serialized-speculation --emulate-answer-tokens 12 "
        "--emulate-speed 10"
    )
    speculation = replace(
        SPECULATION_DEFAULTS["STANDALONE"],
        steps=5,
        top_k=2,
        draft_tokens=8,
        draft_step_seconds=0.003,
        acceptance_length=3.5,
    )
    assert replace(parse([*tokenizer, *flags.split()]), arguments={}) == EngineSettings(
        tokenizer[1],
        host="127.0.0.2",
        port=31000,
        model_path="m",
        served_model_name="s",
        api_key="k",
        context_length=100,
        max_running_requests=7,
        max_total_tokens=1000,
        enable_cache_report=True,
        time_model=TimeModel(500, 0.02, 0.001, speculation),
        serialized_speculation=True,
        speed=10,
        seed=3,
        mean_answer_tokens=12,
    )


def test_other_sglang_flags_are_accepted_and_reported(tokenizer: list[str]) -> None:
    flags = "--tp-size 2 --enable-metrics --mem-fraction-static 0.8 --cuda-graph-bs 1 2 4"
    arguments = parse([*tokenizer, *flags.split()]).arguments
    assert {name: arguments[name] for name in ("tp_size", "enable_metrics", "cuda_graph_bs")} == {
        "tp_size": 2,
        "enable_metrics": True,
        "cuda_graph_bs": [1, 2, 4],
    }


def test_api_key_is_not_reported(tokenizer: list[str]) -> None:
    assert "secret" not in str(parse([*tokenizer, "--api-key", "secret"]).arguments)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--speculative-num-step 3", "unrecognized arguments: --speculative-num-step"),
        ("--speculative-algorithm TYPO", "invalid choice: 'TYPO'"),
        ("--speculative-num-steps 3", "options for speculation require --speculative-algorithm"),
        ("--emulate-acceptance-length 2", "options for speculation require --speculative-algorithm"),
        (
            "--speculative-algorithm EAGLE --emulate-acceptance-length 9",
            "--emulate-acceptance-length 9.0 must be between 1 and the number of draft tokens, 4",
        ),
        ("--emulate-speed 0", "0 is not positive"),
        ("--tokenizer-path /nowhere", "--tokenizer-path is required"),
    ],
)
def test_invalid_flag_is_rejected_with_an_explanation(
    flags: str, complaint: str, tokenizer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        parse([*tokenizer, *flags.split()])
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err
