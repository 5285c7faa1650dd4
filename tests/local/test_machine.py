"""Detection of usable GPUs and of the installed version of SGLang."""

import sys
from pathlib import Path

import pytest

from dps_local.machine import SGLangNotFound, check_mooncake, gpus, sglang_version


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        ("0,3", ["0", "3"]),
        ("0, 3", ["0", "3"]),
        ("GPU-a1", ["GPU-a1"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
    ],
)
def test_cuda_visible_devices_selects_the_gpus(visible: str, wanted: list[str]) -> None:
    """CUDA ignores all ids from the first negative one on."""
    assert gpus({"CUDA_VISIBLE_DEVICES": visible}) == wanted


def test_missing_sglang_is_reported_with_installation_instructions() -> None:
    with pytest.raises(SGLangNotFound) as caught:
        sglang_version(sys.executable)
    assert str(caught.value) == (
        f"SGLang is not installed for {sys.executable}: run '{sys.executable} -m pip install sglang', "
        "or pass an interpreter that has it as --engine-python"
    )


def test_missing_mooncake_is_reported_with_installation_instructions() -> None:
    with pytest.raises(
        SGLangNotFound, match=r"Mooncake is not installed for .*pip install mooncake-transfer-engine"
    ):
        check_mooncake(sys.executable)


def test_missing_interpreter_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SGLangNotFound, match=r"cannot run --engine-python .*/none: .*No such file"):
        sglang_version(str(tmp_path / "none"))


def test_version_is_read_from_the_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.23\n")
    python.chmod(0o755)
    assert sglang_version(str(python)) == "0.5.23"
