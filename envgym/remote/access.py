"""Access to servers: their tokens, of which a server keeps hashes only, who is refused without them, and a client's
addresses and certificates."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import socket
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import aiohttp

from envgym.errors import ConfigError

from .listening import is_loopback
from .wire import Problem

DIAL_SECONDS = 10.0
"""Time limit for making a connection."""
MIN_LENGTH = 16
"""Characters of the shortest token: a shorter one can be guessed."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The characters that RFC 6750 allows in a bearer token."""
_QUOTA = re.compile(r"max_sessions=([1-9][0-9]{0,8})")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """A sender of requests, who sees its own sessions only, of which `max_sessions` may be open at once (None: any)."""

    name: str
    max_sessions: int | None = None


ANYONE = Client("anyone")
"""The one client of a server without tokens."""


class Tokens:
    """The clients of a token file."""

    def __init__(self, clients: Sequence[tuple[bytes, Client]]) -> None:
        self._clients = tuple(clients)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Those of the file at `path`: lines `NAME TOKEN [max_sessions=N]`, or one token alone; `#` begins a comment.

        Raises `ConfigError` for a file that is missing or malformed, or that others on this machine can open. No
        message holds anything that the file says.
        """
        clients: dict[str, tuple[bytes, Client]] = {}
        for number, words in _lines(path):
            client, token = _client(words, f"token file {path}, line {number}")
            digest = _digest(token)
            if client.name in clients or any(digest == known for known, _ in clients.values()):
                raise ConfigError(f"token file {path}, line {number}: a name or a token comes twice")
            clients[client.name] = digest, client
        return cls(list(clients.values()))

    def client(self, authorization: str | None) -> Client:
        """The client that sent the header `Authorization`. Raises a 401 `Problem` where no known one did."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Problem(401, "unauthorized", "this server asks for a token: Authorization: Bearer TOKEN")
        # All hashes are compared, each in constant time: how long it takes tells nothing of any token.
        digest, found = _digest(token.strip()), None
        for known, client in self._clients:
            if hmac.compare_digest(known, digest):
                found = client
        if found is None:
            raise Problem(401, "unauthorized", "the token is not known here")
        return found


def read_token(path: Path) -> str:
    """The token a client sends, of a file that holds this one alone, by itself or in a line as the server's file has.

    Raises `ConfigError` as `Tokens.read` does, and where the file holds several.
    """
    lines = _lines(path)
    if len(lines) > 1:
        raise ConfigError(f"token file {path} holds {len(lines)} tokens; a client's holds its own alone")
    [(number, words)] = lines
    return _client(words, f"token file {path}, line {number}")[1]


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a token file with their numbers, each as its words; a token alone gets a name."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"token file {path} can be read by others on this machine: chmod 600 {path}")
    lines = [(number, words) for number, line in enumerate(text.splitlines(), 1) if (words := _words(line))]
    if not lines:
        raise ConfigError(f"token file {path} holds no token; write one of at least {MIN_LENGTH} characters into it")
    if len(lines) == 1 and len(lines[0][1]) == 1:
        lines = [(lines[0][0], ["default", *lines[0][1]])]
    return lines


def _words(line: str) -> list[str]:
    return line.partition("#")[0].split()


def _client(words: list[str], where: str) -> tuple[Client, str]:
    quota = _QUOTA.fullmatch(words[2]) if len(words) == 3 else None
    if not 2 <= len(words) <= 3 or (len(words) == 3 and quota is None) or not _NAME.fullmatch(words[0]):
        raise ConfigError(f"{where}: a line is NAME TOKEN [max_sessions=N]")
    if len(words[1]) < MIN_LENGTH or not _TOKEN.fullmatch(words[1]):
        raise ConfigError(
            f"{where}: a token has at least {MIN_LENGTH} characters, letters, digits and -._~+/=; make one with: "
            "openssl rand -hex 32"
        )
    return Client(words[0], None if quota is None else int(quota.group(1))), words[1]


def _digest(token: str) -> bytes:
    # Tokens are long and random, so that a plain hash cannot be turned back by guessing.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


# ---------------------------------------------------------------------------------------------------------
# A client's side


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


def url_parts(url: str, schemes: Sequence[str], form: str, *, token: str = "token_file") -> SplitResult:
    """The parts of a URL with a host; `form` says what it looks like, and `token` what names a file with a token.

    Raises `ConfigError` for another URL. A user or password in it would be saved with every run: it is not taken, and
    not repeated here.
    """
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ConfigError(f"a URL holds no user or password: put the token into a file ({token}); {form}")
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        port = parts.port
        is_plain = url.isprintable() and not parts.query and not parts.fragment
        if is_plain and parts.scheme in schemes and parts.hostname and port != 0:
            return parts
    raise ConfigError(f"{url}: not a usable URL; {form}")


def parse_address(url: str) -> Address:
    """The two halves of `http://HOST:PORT[/NAME]`. Raises `ConfigError` for another form of URL."""
    form = "it looks like http://HOST:PORT/NAME"
    parts = url_parts(url, ("http", "https"), form)
    name = parts.path.strip("/")
    if "/" in name:
        raise ConfigError(f"{url}: not a usable URL; {form}")
    return Address(f"{parts.scheme}://{parts.netloc}", name)


def access(servers: list[str], token_file: Path | None, ca_file: Path | None) -> Access:
    """Access to all of `servers`. Raises `ConfigError` for files that cannot be used."""
    headers = {}
    if token_file is not None:
        headers["Authorization"] = f"Bearer {read_token(token_file.expanduser())}"
        for server in servers:
            if server.startswith("http://") and not is_loopback(urlsplit(server).hostname or ""):
                logger.warning("%s is asked without TLS: the token can be read on the way", server)
    return Access(headers, True if ca_file is None else _trusting(ca_file.expanduser()))


def unreachable(url: str, error: Exception) -> str:
    """The reason why no connection to `url` came about, and what to do."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        failed = error.certificate_error
        reason = str(getattr(failed, "verify_message", failed)).rstrip(".")
        if "mismatch" in reason or "not valid for" in reason:
            return f"its certificate is for another name ({reason}); use a name that it has"
        return f"its certificate is not trusted here ({reason}); the setting ca_file, or --ca-file, names one that is"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"the TLS connection failed ({cause}); is it https?"
    if isinstance(cause, socket.gaierror) or isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the host name {urlsplit(url).hostname!r} is not known; check the address"
    if isinstance(cause, ConnectionRefusedError):
        return "nothing answers there (connection refused); start it there, or check the address"
    if isinstance(error, aiohttp.ServerTimeoutError):
        return f"no connection within {DIAL_SECONDS:g} s; check the address, and that it can be reached from here"
    what = f"the connection failed ({str(error) or type(error).__name__}); check the server and the address"
    return what + (", is it https?" if isinstance(error, aiohttp.ServerDisconnectedError) else "")


def _trusting(ca_file: Path) -> ssl.SSLContext:
    """TLS that trusts the certificates of `ca_file` (PEM), and no others."""
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"certificate file {ca_file}: {error.strerror or error}") from None


def refuse_web_pages(host: str, origin: str | None) -> None:
    """Raise a 403 `Problem` for a web page: a server without tokens is for programs of this machine.

    A page in a browser here can reach it as well, and by a name of its own that points here (DNS rebinding) read what
    it answers. Browsers say so: in `Origin`, and in `Host`.
    """
    if origin is not None:
        raise Problem(403, "forbidden", "web pages may not use a server without tokens")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(name):
        raise Problem(403, "forbidden", "without tokens this server answers to localhost, 127.0.0.1 and [::1] only")
