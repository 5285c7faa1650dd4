"""The command line of `dps engine`."""

from pathlib import Path

import pytest

from dps_local.emulated_sglang.flags import parse


@pytest.fixture
def tokenizer(tmp_path: Path) -> list[str]:
    return ["--tokenizer-path", str(tmp_path)]


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
        (
            "--enable-hierarchical-cache --hicache-storage-backend mooncake --emulate-storage-directory pages "
            "--hicache-storage-prefetch-policy best_effort",
            "--hicache-storage-prefetch-policy best_effort is not emulated; use timeout",
        ),
    ],
)
def test_invalid_flag_is_rejected_with_an_explanation(
    flags: str, complaint: str, tokenizer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        parse([*tokenizer, *flags.split()])
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err
