"""Files of tokens: who they let in, and which are refused in one line that tells nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from envgym.errors import ConfigError
from envgym.net.problems import Problem
from envgym.net.tokens import Tokens

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef00"


def refused(tmp_path: Path, text: str, mode: int = 0o600) -> str:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError) as raised:
        Tokens.read(file)
    message = str(raised.value)
    assert "\n" not in message
    assert ALICE not in message
    return message


def test_a_token_file_that_others_can_read_is_refused(tmp_path):
    for mode in (0o644, 0o640, 0o604, 0o620):
        assert f"chmod 600 {tmp_path / 'tokens'}" in refused(tmp_path, ALICE, mode)


def test_a_malformed_token_file_is_one_line_that_tells_nothing_of_it(tmp_path):
    assert "holds no token" in refused(tmp_path, "# none yet\n\n")
    assert "at least 16 characters" in refused(tmp_path, "tooshort")
    assert "at least 16 characters" in refused(tmp_path, f"alice {ALICE}ä")
    assert "line 2: a line is NAME TOKEN" in refused(tmp_path, f"alice {ALICE}\n{BOB}\n")
    assert "line 1: a line is NAME TOKEN" in refused(tmp_path, f"alice {ALICE} max_sessions=0\n")
    assert "line 1: a line is NAME TOKEN" in refused(tmp_path, f"al/ice {ALICE}\n")
    assert "line 2: a name or a token appears twice" in refused(tmp_path, f"alice {ALICE}\nalice {BOB}\n")
    assert "line 2: a name or a token appears twice" in refused(tmp_path, f"alice {ALICE}\nbob {ALICE}\n")
    with pytest.raises(ConfigError, match="No such file"):
        Tokens.read(tmp_path / "nothing")
    (tmp_path / "binary").touch(0o600)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file"):
        Tokens.read(tmp_path / "binary")


def test_who_a_token_belongs_to(tmp_path):
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"{ALICE}\n")
    assert Tokens.read(file).client(f"bearer  {ALICE} ").name == "default"
    with pytest.raises(Problem, match="not known here"):
        Tokens.read(file).client(f"Bearer {BOB}")
    file.write_text(f"a {ALICE}\nb {BOB} max_sessions=7\n")
    client = Tokens.read(file).client(f"Bearer {BOB}")
    assert (client.name, client.max_sessions) == ("b", 7)
    assert ALICE not in repr(vars(Tokens.read(file)))
