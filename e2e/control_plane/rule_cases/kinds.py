"""The kinds of test cases for validation rules. Each maps a description of the case to it."""

from collections.abc import Mapping
from typing import Any

Spec = dict[str, Any]
"""Fields of a spec that differ from the minimal one."""

Refused = Mapping[str, tuple[Spec, str]]
"""Specs that violate a rule, and a part of the rule's message."""
Accepted = Mapping[str, Spec]
"""Valid specs."""
Immutable = Mapping[str, tuple[Spec, Spec, str]]
"""Changes that violate a rule: the spec before and after, and a part of the rule's message."""
