"""The README is true: every command in it is run by CI or by a test, and every link leads somewhere."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

RUN_BY = {
    "make demo": (".ci/run", "make demo"),
    "make test": (".ci/run", "make test"),
    ".venv/bin/dps up": ("tests/integration/test_up.py", '"up"'),
    ".venv/bin/dps up --speculative-url http://127.0.0.1:30000 --greedy-url http://127.0.0.1:30001": (
        "tests/integration/test_up.py",
        '"--speculative-url", speculative.url, "--greedy-url"',
    ),
    ".venv/bin/dps up --engine sglang --model Qwen/Qwen2.5-7B-Instruct"
    " --draft-model Qwen/Qwen2.5-1.5B-Instruct": (
        "e2e/real_sglang/test_up_sglang.py",
        '"--engine", "sglang"',
    ),
    ".venv/bin/dps gateway --config gateway.yaml": (
        "testkit/dps_testkit/processes.py",
        '"gateway", "--config"',
    ),
}
"""A command of the README -> the file that runs it, and how that reads there."""
RUN_WHOLE = {"## On Kubernetes": "e2e/node/test_readme_journey.py"}
"""A section whose commands are run as they stand -> the test that takes them from there."""


def commands() -> list[str]:
    sections = re.split(r"^(?=## )", README, flags=re.MULTILINE)
    text = "".join(one for one in sections if one.partition("\n")[0] not in RUN_WHOLE)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]


def test_every_command_is_run_somewhere() -> None:
    assert set(commands()) == set(RUN_BY)


@pytest.mark.parametrize("section", RUN_WHOLE)
def test_a_section_that_is_run_whole_is_read_by_its_test(section: str) -> None:
    assert f"\n{section}\n" in README
    assert section in (ROOT / RUN_WHOLE[section]).read_text()


@pytest.mark.parametrize("command", RUN_BY)
def test_it_is_run_where_we_say(command: str) -> None:
    file, evidence = RUN_BY[command]
    assert evidence in (ROOT / file).read_text()


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    missing = [
        target
        for target in targets
        if "://" not in target and not (document.parent / target.partition("#")[0]).exists()
    ]
    assert missing == []
