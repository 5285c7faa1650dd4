"""What is found on a machine: GPUs that may be used, and an interpreter that has SGLang."""

import sys
from pathlib import Path

import pytest

from dps_local.machine import NoSGLang, gpus, sglang_version


@pytest.mark.parametrize(("visible", "wanted"), [("0,3", ["0", "3"]), ("GPU-a1", ["GPU-a1"]), ("", [])])
def test_cuda_visible_devices_decides(visible: str, wanted: list[str]) -> None:
    assert gpus({"CUDA_VISIBLE_DEVICES": visible}) == wanted


def test_an_interpreter_without_sglang_is_told_how_to_get_it() -> None:
    with pytest.raises(NoSGLang) as told:
        sglang_version(sys.executable)
    assert str(told.value) == (
        f"{sys.executable} has no SGLang: install it with '{sys.executable} -m pip install sglang', "
        "or name an interpreter that has it by --engine-python"
    )


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSGLang, match=r"--engine-python .*/none cannot be run: .*No such file"):
        sglang_version(str(tmp_path / "none"))


def test_the_version_is_what_the_interpreter_says(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.23\n")
    python.chmod(0o755)
    assert sglang_version(str(python)) == "0.5.23"
