"""Who may use a server: a file of tokens, of which only hashes are kept in memory."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envgym.errors import ConfigError

from .wire import Problem

MIN_LENGTH = 16
"""Characters of the shortest token: a shorter one can be guessed."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The characters that RFC 6750 allows in a bearer token."""
_QUOTA = re.compile(r"max_sessions=([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends requests; sees its own sessions only. `max_sessions` it may have open at once (None: no quota)."""

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
        """Who sent the header `Authorization`. Raises a 401 `Problem` where nobody known did."""
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
