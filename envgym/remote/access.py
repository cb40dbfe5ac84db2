"""A client's access to servers: their addresses, the token it sends, the certificates it trusts."""

from __future__ import annotations

import contextlib
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from envgym.errors import ConfigError
from envgym.net.client import failure_of
from envgym.net.listening import is_loopback
from envgym.net.tokens import read_token

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an environment: `server` as `http://HOST:PORT`, and its name there, empty for the only one."""

    server: str
    name: str

    def __str__(self) -> str:
        return f"{self.server}/{self.name}" if self.name else self.server


@dataclass(frozen=True, slots=True)
class Access:
    """A client's headers with its token, and the certificates it trusts. The token is in no representation of it."""

    headers: dict[str, str] = field(repr=False)
    tls: ssl.SSLContext | bool = True


def parse_address(url: str) -> Address:
    """The two halves of `http://HOST:PORT[/NAME]`. Raises `ConfigError` for another form of URL.

    A user or password in it would be saved with every run: it is rejected, and the message does not repeat it.
    """
    form = "it looks like http://HOST:PORT/NAME"
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ConfigError(f"a URL holds no user or password: put the token into a file (token_file); {form}")
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        name, port = parts.path.strip("/"), parts.port
        is_plain = url.isprintable() and not parts.query and not parts.fragment and "/" not in name
        if is_plain and parts.scheme in ("http", "https") and parts.hostname and port != 0:
            return Address(f"{parts.scheme}://{parts.netloc}", name)
    raise ConfigError(f"{url}: not a usable URL; {form}")


def access(servers: list[str], token_file: Path | None, ca_file: Path | None) -> Access:
    """Access to all of `servers`. Warns of a token that is sent without TLS. Raises `ConfigError` for files that cannot
    be used."""
    headers = {}
    if token_file is not None:
        headers["Authorization"] = f"Bearer {read_token(token_file)}"
        for server in servers:
            if server.startswith("http://") and not is_loopback(urlsplit(server).hostname or ""):
                logger.warning("%s is reached without TLS: the token can be read on the way", server)
    return Access(headers, True if ca_file is None else _tls_context(ca_file.expanduser()))


def connection_failure(error: Exception) -> str:
    """The reason why a connection failed, and the remedy."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cert_error = error.certificate_error
        reason = str(getattr(cert_error, "verify_message", cert_error)).rstrip(".")
        if "mismatch" in reason or "not valid for" in reason:
            return f"its certificate is for another name ({reason}); use a name that it has"
        return f"its certificate is not trusted here ({reason}); the setting ca_file, or --ca-file, names trusted ones"
    is_unclear = isinstance(error, aiohttp.ClientConnectorSSLError | aiohttp.ServerDisconnectedError)
    return f"{failure_of(error)}; start it there, or check the address{is_unclear * ', is it https?'}"


def _tls_context(ca_file: Path) -> ssl.SSLContext:
    """TLS that trusts the certificates of `ca_file` (PEM), and no others."""
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"certificate file {ca_file}: {error.strerror or error}") from None
