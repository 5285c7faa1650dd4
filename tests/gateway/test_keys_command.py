"""`dps keys`: editing the key file."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from multidict import CIMultiDict

from dps_gateway.auth import Keys, Unauthorized
from dps_gateway.commands.keys import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def run(file: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(command: str, *arguments: str) -> tuple[int, str, str]:
        status = main([command, "--file", str(file), *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def tenant(file: Path, key: str) -> str:
    return Keys.load(file).key(CIMultiDict({"Authorization": f"Bearer {key}"})).tenant


def test_added_key_is_valid_and_only_its_hash_is_stored(file: Path, run: Run) -> None:
    status, printed, _ = run("add", "team-a")
    key = printed.strip()
    assert (status, tenant(file, key)) == (0, "team-a")
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_revoked_key_is_no_longer_valid_and_everything_else_is_kept(file: Path, run: Run) -> None:
    before = "# keys of the platform team\n\nteam-b:sk-plain\n"
    file.write_text(before)
    file.chmod(0o640)
    options = ["--expires", "2999-01-31", "--models", "m", "--max-in-flight", "4", "--urgency", "1"]
    options += ["--requests-per-minute", "60", "--tokens-per-minute", "100000"]
    key = run("add", "team-a", *options)[1].strip()
    row = next(line.split() for line in run("list")[1].splitlines() if "team-a" in line)
    assert row[1:] == ["team-a", "2999-01-31T00:00:00+00:00", "m", "4", "60", "100000", "1", "hash"]
    assert run("revoke", row[0]) == (0, "", "")
    with pytest.raises(Unauthorized):
        tenant(file, key)
    assert file.read_text() == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_list_shows_no_key(file: Path, run: Run) -> None:
    file.write_text("team-b:sk-plain\n")
    status, printed, _ = run("list")
    assert (status, "sk-plain" in printed) == (0, False)
    assert "never" in printed
    assert "plain text" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "team:a"), "the tenant 'team:a' must not contain a colon"),
        (("add", "team", "--models", "a, b"), "models=a, b must not contain white space"),
        (("list",), "cannot be read: No such file"),
    ],
)
def test_invalid_arguments_create_no_file(
    file: Path, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    status, _, error = run(*arguments)
    assert (status, message in error) == (2, True)
    assert not file.exists()


def test_invalid_file_is_reported_without_its_keys_and_left_unchanged(file: Path, run: Run) -> None:
    file.write_text("sk-secret\n")
    status, _, error = run("add", "team")
    assert (status, error) == (2, f"dps keys: {file}, line 1 is not of the form TENANT:KEY\n")
    assert file.read_text() == "sk-secret\n"
