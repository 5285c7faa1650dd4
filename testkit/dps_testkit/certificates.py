"""Certificates for tests of TLS."""

import subprocess
from pathlib import Path


def certify(certificate: Path, key: Path) -> None:
    """Create a self-signed certificate for localhost. Requires openssl."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
