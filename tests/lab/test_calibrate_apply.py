"""Writing a calibrated policy: the gateway's configuration keeps everything else, and a DPSRouter gets a patch."""

import os
import stat
from pathlib import Path

import pytest
import yaml

from dps_gateway.config import ConfigError, load_config
from dps_lab.calibrate.apply import apply, patch, with_routing
from dps_lab.calibrate.setup import Setup

DELTA = Setup(1, 1, "DeltaPrefill", 300)
VALUES = {"policy": "DeltaPrefill", "thresholdTokens": 300}
REST = """\
model: {name: sample, tokenizer: ./tokenizer}
pools:
  speculative: {endpoints: ["http://127.0.0.1:30000"]}
  greedy: {endpoints: ["http://127.0.0.1:30001"]}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("a: 1\n", "a: 1\nrouting: {policy: DeltaPrefill}\n", id="no routing"),
        pytest.param("routing:\na: 1\n", "routing: {policy: DeltaPrefill}\na: 1\n", id="empty"),
        pytest.param("routing: {}\n", "routing:  {policy: DeltaPrefill}\n", id="empty mapping"),
        pytest.param(
            "routing: {policy: Random, thresholdTokens: 5}  # kept\na: 1\n",
            "routing: {policy: DeltaPrefill, thresholdTokens: 5}  # kept\na: 1\n",
            id="flow style",
        ),
        pytest.param(
            "routing:\n  # kept\n  policy: 'Random'  # kept\n",
            'routing:\n  # kept\n  policy: "DeltaPrefill"  # kept\n',
            id="block style",
        ),
        pytest.param(
            "routing:\n  thresholdTokens: 5\na: 1\n",
            "routing:\n  policy: DeltaPrefill\n  thresholdTokens: 5\na: 1\n",
            id="other key only",
        ),
        pytest.param(
            '{"routing": {"policy": "Random"}, "a": 1}',
            '{"routing": {"policy": "DeltaPrefill"}, "a": 1}',
            id="JSON",
        ),
        pytest.param(
            '{"a": 1}', '{"routing": {"policy": "DeltaPrefill"}, "a": 1}', id="JSON without routing"
        ),
    ],
)
def test_only_the_text_of_the_policy_changes(before: str, after: str) -> None:
    assert with_routing(before, {"policy": "DeltaPrefill"}) == after


@pytest.mark.parametrize("before", ["a: 1\n", "routing:\n", '{"a": 1}', "routing:\n  policy: Random\n"])
def test_policy_and_threshold_are_both_written(before: str) -> None:
    assert yaml.safe_load(with_routing(before, VALUES))["routing"] == VALUES


def test_a_null_threshold_is_replaced() -> None:
    assert with_routing("routing: {thresholdTokens: null}\n", {"thresholdTokens": 300}) == (
        "routing: {thresholdTokens: 300}\n"
    )


def test_routing_that_cannot_be_edited_in_place_is_an_error() -> None:
    text = "x: &shared {policy: Random}\nrouting: *shared\n"
    with pytest.raises(ConfigError, match="by hand"):
        with_routing(text, VALUES)


def test_a_configuration_file_keeps_its_other_content_and_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"# first\n{REST}")
    path.chmod(0o640)
    apply(DELTA, path)
    assert path.read_text() == f"# first\n{REST}routing: {{thresholdTokens: 300, policy: DeltaPrefill}}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["gateway.yaml"]
    assert load_config(path).routing.threshold_tokens == 300


def test_an_interrupted_change_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(REST)

    def interrupt(_file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        apply(DELTA, path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == REST


def test_a_symbolic_link_to_a_configuration_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(REST)
    link = tmp_path / "gateway.yaml"
    link.symlink_to("real.yaml")
    apply(DELTA, link)
    assert link.is_symlink()
    assert load_config(link).routing.threshold_tokens == 300


@pytest.mark.parametrize(
    ("content", "message"),
    [("model: {", "invalid YAML"), ("model: {name: x}\n", "pools: missing"), (None, "cannot be read")],
)
def test_an_invalid_configuration_file_stays_as_it_is(
    content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        apply(DELTA, path)
    assert content is None or path.read_text() == content


def test_a_patch_sets_the_routing_and_the_replicas_of_both_pools() -> None:
    assert yaml.safe_load(patch(Setup(3, 1, "DeltaPrefill", 300))) == {
        "spec": {
            "routing": {"policy": "DeltaPrefill", "thresholdTokens": 300},
            "pools": {"speculative": {"replicas": 3}, "greedy": {"replicas": 1}},
        }
    }


@pytest.mark.parametrize(
    ("setup", "unused"),
    [(Setup(0, 2, "AlwaysGreedy"), "speculative"), (Setup(2, 0, "AlwaysSpeculative"), "greedy")],
)
def test_a_patch_for_one_pool_explains_the_replica_of_the_other(setup: Setup, unused: str) -> None:
    text = patch(setup)
    assert f"so the {unused} pool keeps one" in text
    spec = yaml.safe_load(text)["spec"]
    assert spec["routing"] == {"policy": setup.policy}
    assert spec["pools"][unused] == {"replicas": 1}
