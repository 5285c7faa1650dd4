"""Writes a chosen policy: into a gateway's configuration file, as a patch for a DPSRouter, or as a recommendation."""

import json
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from dps_gateway.config import ConfigError, parse_config, read_text, replace_text
from dps_lab.calibrate.budget import Rule
from dps_lab.calibrate.result import Calibration
from dps_lab.calibrate.setup import Setup


def routing_of(setup: Setup) -> dict[str, Any]:
    """The keys of `routing` that a set-up determines. Policies without a threshold keep the current one."""
    threshold = {} if setup.threshold_tokens is None else {"thresholdTokens": setup.threshold_tokens}
    return {"policy": setup.policy, **threshold}


def apply(setup: Setup, path: Path) -> None:
    """Change `routing` in a configuration file, atomically. Comments and all other keys stay as they are.

    Raises ConfigError if the file cannot be read or written, is invalid, or has a form that cannot be edited.
    """
    target = path.resolve()
    changed = with_routing(_valid(path), routing_of(setup))
    try:
        replace_text(target, changed, target.stat().st_mode & 0o777)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; check its permissions") from error


def check(path: Path) -> None:
    """Raise ConfigError if `routing` in a configuration file cannot be changed. Does not modify the file."""
    with_routing(_valid(path), {"policy": "DeltaPrefill", "thresholdTokens": 128})


def _valid(path: Path) -> str:
    """The text of a configuration file. Raises ConfigError if it cannot be read or is invalid."""
    text = read_text(path)
    parse_config(text, source=str(path), environment={})
    return text


def with_routing(text: str, values: dict[str, Any]) -> str:
    """A configuration with these keys of `routing`. Only their text is changed.

    Raises ConfigError if the keys cannot be changed in place, for example if `routing` is a YAML alias.
    """
    before = yaml.safe_load(text)
    expected = before | {"routing": (before.get("routing") or {}) | values}
    changed = text
    for key, value in values.items():
        changed = _set(changed, key, value)
    try:
        after = yaml.safe_load(changed)
    except yaml.YAMLError:
        after = None
    if after != expected:
        changes = ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items())
        raise ConfigError(
            f"routing cannot be changed in place in this form of YAML; set routing: {{{changes}}} by hand"
        )
    return changed


def patch(setup: Setup) -> str:
    """A merge patch for a DPSRouter, in YAML. Each pool of a DPSRouter has at least one replica."""
    spec = {
        "routing": routing_of(setup),
        "pools": {
            "speculative": {"replicas": max(1, setup.speculative)},
            "greedy": {"replicas": max(1, setup.greedy)},
        },
    }
    text = yaml.safe_dump({"spec": spec}, sort_keys=False)
    if setup.two_pools:
        return text
    unused = "greedy" if setup.speculative else "speculative"
    return (
        f"# A DPSRouter has at least one replica in each pool, so the {unused} pool keeps one, which serves only\n"
        f"# when no replica of the other pool can. With it, the fleet has one engine more than was calibrated.\n{text}"
    )


def recommendation(result: Calibration, rule: Rule | None = None) -> str:
    """The choice as one JSON object, which fits into the termination message of a container (4,096 bytes).

    The operator reads it and adds the time (`status.routing.recommended`). `seconds`: the figure that was minimised.
    rule: that of the GPU budget; None without one.
    """
    document: dict[str, Any] = {
        **routing_of(result.choice),
        "objective": result.goal.objective,
        "seconds": round(result.goal.value(result.figures), 3),
        "verdict": result.verdict(),
    }
    if rule is not None:
        document["gpuBudget"] = {
            "speculativeReplicas": result.choice.speculative,
            "greedyReplicas": result.choice.greedy,
            "loadRatio": rule.load_ratio,
        }
    return json.dumps(document)


def _set(text: str, key: str, value: str | int) -> str:
    """Replace or insert one key of `routing`."""
    root = yaml.compose(text)
    assert isinstance(root, MappingNode)
    quoted = root.value[0][0].style == '"'
    routing = _child(root, "routing")
    if routing is None and root.flow_style:
        return _insert(text, root, "routing", _flow_mapping(key, value, quoted))
    if routing is None:
        return f"{text.rstrip()}\nrouting: {_flow_mapping(key, value, quoted)}\n"
    if not isinstance(routing, MappingNode) or not routing.value:
        return _replaced(text, routing, f" {_flow_mapping(key, value, quoted)}")
    node = _child(routing, key)
    if node is None:
        return _insert(text, routing, key, json.dumps(value) if quoted else str(value))
    plain = isinstance(node, ScalarNode) and node.style is None and not quoted
    return _replaced(text, node, str(value) if plain else json.dumps(value))


def _flow_mapping(key: str, value: str | int, quoted: bool) -> str:
    return json.dumps({key: value}) if quoted else f"{{{key}: {value}}}"


def _replaced(text: str, node: Node, written: str) -> str:
    return text[: node.start_mark.index] + written + text[node.end_mark.index :]


def _insert(text: str, mapping: MappingNode, key: str, written: str) -> str:
    """Add a key before the first key of a mapping, in the same style."""
    first = mapping.value[0][0]
    name = json.dumps(key) if first.style == '"' else key
    start = first.start_mark.index
    separator = ", " if mapping.flow_style else "\n" + " " * first.start_mark.column
    return f"{text[:start]}{name}: {written}{separator}{text[start:]}"


def _child(node: Node | None, key: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)
