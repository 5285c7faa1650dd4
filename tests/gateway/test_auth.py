"""API keys: their validation, their tenants, and their absence from error messages."""

from pathlib import Path

import pytest
from multidict import CIMultiDict

from dps_gateway.auth import Keys, Unauthorized
from dps_gateway.config import ConfigError


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys"
    path.write_text("# two tenants\nteam-a: sk-one\nteam-a:sk-two\n\nteam-b:sk:with:colons\n")
    return Keys.load(path)


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"Authorization": "Bearer sk-one"}, "team-a"),
        ({"authorization": "bearer sk-two"}, "team-a"),
        ({"x-api-key": "sk:with:colons"}, "team-b"),
    ],
)
def test_key_identifies_its_tenant(keys: Keys, headers: dict[str, str], tenant: str) -> None:
    assert keys.tenant(CIMultiDict(headers)) == tenant


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        pytest.param({}, "an API key is required", id="no key"),
        pytest.param({"Authorization": "Basic sk-one"}, "an API key is required", id="another scheme"),
        pytest.param({"Authorization": "Bearer sk-on"}, "not valid", id="prefix of a key"),
        pytest.param({"Authorization": "Bearer team-a:sk-one"}, "not valid", id="line of the file"),
        pytest.param({"Authorization": "Bearer \udcff"}, "not valid", id="not UTF-8"),
    ],
)
def test_invalid_credentials_are_refused(keys: Keys, headers: dict[str, str], message: str) -> None:
    with pytest.raises(Unauthorized, match=message):
        keys.tenant(CIMultiDict(headers))


@pytest.mark.parametrize("line", ["sk-secret", ":sk-secret", "team-a:"])
def test_malformed_line_is_reported_without_its_key(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{line}\n")
    with pytest.raises(ConfigError, match="line 2 is not of the form TENANT:KEY") as error:
        Keys.load(path)
    assert "sk-secret" not in str(error.value)
