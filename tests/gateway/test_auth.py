"""API keys: their validation, their limits, their tenants, and their absence from error messages."""

from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from dps_gateway.auth import Forbidden, Key, Keys, Unauthorized, digest_of, parse_key
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
    assert keys.key(CIMultiDict(headers)).tenant == tenant


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
        keys.key(CIMultiDict(headers))


SECRET = "sk-secret"
HASH = f"sha256:{digest_of(SECRET).hex()}"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        pytest.param("", None, id="empty"),
        pytest.param("  # team:sk", None, id="comment"),
        pytest.param(f"team:{SECRET}", Key("team", digest_of(SECRET), hashed=False), id="plain text"),
        pytest.param(f"team:{HASH}", Key("team", digest_of(SECRET)), id="hashed"),
        pytest.param(
            f"team:{HASH} expires=1970-01-02 models=a,b:lora maxInFlight=3",
            Key("team", digest_of(SECRET), True, 86400.0, frozenset({"a", "b:lora"}), 3),
            id="options",
        ),
        pytest.param(
            f"team:{SECRET} expires=1970-01-01T01:00:00+01:00",
            Key("team", digest_of(SECRET), False, 0.0),
            id="time zone",
        ),
        pytest.param("team:a b=c", Key("team", digest_of("a b=c"), hashed=False), id="space in the key"),
    ],
)
def test_line_of_the_key_file(line: str, key: Key | None) -> None:
    assert parse_key(line) == key


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("team:sha256:sk-secret", "without 64 hexadecimal digits"),
        (f"team:{HASH} expires=soon", "contains expires=soon"),
        (f"team:{HASH} models=a,,b", "contains models=a,,b"),
        (f"team:{HASH} maxInFlight=0", "contains maxInFlight=0"),
        (f"team:{HASH} urgency=8", "contains urgency=8"),
        *(
            (line, "is not of the form TENANT:KEY")
            for line in (SECRET, f":{SECRET}", "t:", "expires=2027-01-01")
        ),
    ],
)
def test_invalid_line_is_reported_without_its_key(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{line}\n")
    with pytest.raises(ConfigError, match=f"line 2 .*{message}") as error:
        Keys.load(path)
    assert SECRET not in str(error.value)


def test_key_is_refused_from_its_expiry_on() -> None:
    now = 99.9
    keys = Keys([Key("team", digest_of(SECRET), expires=100.0)], clock=lambda: now)
    headers = CIMultiDict({"x-api-key": SECRET})
    assert keys.key(headers).tenant == "team"
    now = 100.0
    with pytest.raises(Unauthorized, match="has expired"):
        keys.key(headers)


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({}, True),
        ({"model": "base"}, True),
        ({"model": "other"}, False),
        ({"model": ["base"]}, False),
        ({"model": "base:a"}, True),
        ({"lora_path": "a"}, True),
        ({"lora_path": "b"}, False),
        ({"lora_path": ["a", "b"]}, False),
        ({"model": "base", "lora_path": None}, True),
    ],
)
def test_key_may_use_only_its_models_and_adapters(body: dict[str, Any], allowed: bool) -> None:
    key = Key("team", b"", models=frozenset({"base", "base:a"}))
    Key("team", b"").check_models(body, "base")
    if allowed:
        key.check_models(body, "base")
    else:
        with pytest.raises(Forbidden, match="it may use base, base:a"):
            key.check_models(body, "base")


def test_tenant_whose_last_key_was_revoked_is_not_authorized() -> None:
    with pytest.raises(Unauthorized, match="revoked"):
        Keys().secret("team")
