"""TLS on the public port, whose certificate can be replaced, and the trusted authorities of engines."""

import ssl
from pathlib import Path

from dps_gateway.config import ConfigError, TlsFiles


class ServerTls:
    """The TLS settings of a listening port. New handshakes use the certificate that was applied last."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._current = context
        self.context = _server_context()
        """The context to listen with. For each handshake it is replaced by the one that was applied last."""
        self.context.sni_callback = self._select

    def apply(self, context: ssl.SSLContext) -> None:
        """Use another certificate for new handshakes. Established connections are unaffected."""
        self._current = context

    def _select(
        self, connection: ssl.SSLSocket | ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        # OpenSSL calls this for every handshake, including those without a server name.
        connection.context = self._current


def certificate_context(files: TlsFiles) -> ssl.SSLContext:
    """A context with the certificate. Raises ConfigError if it cannot be used."""
    context = _server_context()
    try:
        context.load_cert_chain(files.cert_file, files.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"listen.tls: the certificate {files.cert_file} and the key {files.key_file} cannot be used: "
            f"{_reason(error)}"
        ) from error
    return context


def trust(ca_file: Path | None, key: str) -> ssl.SSLContext | bool:
    """The `ssl` argument for requests to servers with certificates from these authorities; True for the system's.

    `key` of the configuration names the file. Raises ConfigError if it cannot be used.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{key}: the certificates in {ca_file} cannot be used: {_reason(error)}") from error


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
