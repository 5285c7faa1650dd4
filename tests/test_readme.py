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
    ".venv/bin/dps gateway --config gateway.yaml": ("tests/support/site.py", '"gateway", "--config"'),
    "helm upgrade --install dps charts/dps-router --namespace dps-system --create-namespace": (
        "e2e/cluster/fixtures.py",
        '"upgrade", "--install", RELEASE, chart, "--create-namespace"',
    ),
    "kubectl apply -f manifests/examples/minimal.yaml": (
        "e2e/control_plane/test_control_plane_chart.py",
        '"apply", "-f", str(',
    ),
    "kubectl get dps": ("e2e/control_plane/test_control_plane.py", '"get", "dps"'),
}
"""A command of the README -> the file that runs it, and how that reads there."""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]


def test_every_command_is_run_somewhere() -> None:
    assert set(commands()) == set(RUN_BY)


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
