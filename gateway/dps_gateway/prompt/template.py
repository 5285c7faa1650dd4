"""Compiling chat templates, with the extensions, filters and functions that transformers provides to them."""

import json
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The statement `{% generation %}`, which marks text for training. It renders its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_DICT_ATTRIBUTES: Final = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which templates read the fields of messages faster."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The value of `obj.attribute` in a template.

        For a field of a message, Jinja catches one or two exceptions, which takes half of the time for a long chat.
        """
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


def compiled(chat_template: str) -> jinja2.Template:
    """The template, in a sandbox, because it may come from a model hub. Raises jinja2.TemplateError."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(chat_template)
    # Jinja copies the globals for every rendering, which takes several times as long for its ChainMap.
    template.globals = dict(template.globals)
    return template


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's filter, this one does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # noqa: DTZ005 - local time, as in transformers
