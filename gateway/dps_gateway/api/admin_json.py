"""The JSON documents of the admin port and of the workers' sockets."""

from typing import Any

import orjson
from aiohttp import web


def json_response(document: Any, status: int = 200) -> web.Response:
    """A response with a document that orjson can serialize, indented for the people who read it."""
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2)
    return web.Response(body=body, status=status, content_type="application/json")
