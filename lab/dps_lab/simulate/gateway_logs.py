"""Reads the decision logs of all replicas of a gateway from their admin ports."""

import http.client
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from dps_lab.simulate.trace import TraceError

TIMEOUT_SECONDS: Final = 30.0
"""Time limit for connecting, and for each read."""

READ_BYTES: Final = 1 << 16

TOKEN: Final = "DPS_ADMIN_TOKEN"
"""The environment variable with the token of the admin port (`listen.adminTokenFile`), if it requires one."""


def read_decision_logs(url: str, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """The lines of the decision log at every address of the URL's host, one address after another.

    In Kubernetes the host is a headless Service, which has an address for each replica. url: the path `/decisions` of
    an admin port. Raises TraceError if the host has no address, or a replica does not return its whole log.
    """
    headers = {"Authorization": f"Bearer {environment[TOKEN]}"} if environment.get(TOKEN) else {}
    for address in _addresses(url):
        try:
            request = urllib.request.Request(address, headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                yield from _lines(answer)
        except urllib.error.HTTPError as error:
            with error:
                explanation = error.read(1000).decode(errors="replace").strip()
            raise TraceError(f"{address}: status {error.code}: {explanation}") from None
        except http.client.IncompleteRead:
            raise TraceError(
                f"{address}: the gateway ended the connection before the end of its log; run the command again"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise TraceError(f"{address}: the gateway does not answer ({error})") from None


def _lines(answer: http.client.HTTPResponse) -> Iterator[str]:
    """The lines of a body. Raises IncompleteRead if it is cut off.

    The body is read in parts, because `readline` takes a chunked body that is cut off between chunks for complete.
    """
    rest = b""
    while part := answer.read(READ_BYTES):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _addresses(url: str) -> list[str]:
    """The URL with each address of its host. Raises TraceError if the URL is invalid or its host is unknown."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise TraceError(f"{url}: the URL has no host; use http://HOST:PORT/decisions")
    try:
        port = parts.port or 80
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise TraceError(f"{url}: the host cannot be resolved ({error})") from None
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    netlocs = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    return [urlunsplit(parts._replace(netloc=netloc)) for netloc in netlocs]
