"""Names for remote environments: given on the command line, they stand wherever an environment does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import envgym
from envgym import registry
from envgym.errors import ConfigError, NameNotFound
from envgym.remote import registered

ENVGYM = Path(sys.executable).with_name("envgym")
TOKEN = "secret-0123456789abcdef"


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """A user's configuration and a project of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [ENVGYM, "envs", *words], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )
    return done.returncode, done.stdout, done.stderr


def test_a_name_stands_for_a_served_environment_until_it_is_removed(game, tmp_path):
    status, out, _ = run("add", "numbers", f"{game.url}/game")
    assert status == 0
    assert "250 train tasks, played by multi_turn" in out
    assert (tmp_path / "config/envgym/environments.yaml").is_file()
    listed = [line.split() for line in run("list")[1].splitlines()]
    assert ["numbers", "remote:", f"{game.url}/game"] in listed

    async def play() -> None:
        env = envgym.make("numbers")
        _, info = await env.reset(seed=1)
        assert info["seed"] == 1
        assert env.spec.id == "numbers"
        await env.close()
        await env.spec.close()

    asyncio.run(play())
    with pytest.raises(NameNotFound, match="Did you mean 'numbers'"):
        registry.spec("number")
    description = registry.spec("numbers", timeout=5).to_json()
    assert run("remove", "numbers")[0] == 0
    with pytest.raises(NameNotFound):
        registry.spec("numbers")
    rebuilt = registry.spec_from_json(description)  # it says where it is
    assert rebuilt.to_json() == description
    status, _, err = run("remove", "numbers")
    assert (status, err.count("\n")) == (2, 1)
    assert "no remote environment is called 'numbers'" in err


def test_the_projects_name_counts_before_the_users(game, start, tmp_path):
    other = start("GuessSpec")
    assert run("add", "numbers", f"{game.url}/game")[0] == 0
    status, out, _ = run("add", "numbers", game.url, f"{other.url}/game", "--project")
    assert status == 0
    assert str(tmp_path / "project/envgym.yaml") in out
    assert registered.registered()["numbers"].urls == (game.url, f"{other.url}/game")
    assert run("remove", "numbers")[0] == 0
    assert registered.registered()["numbers"].urls == (f"{game.url}/game",)


def test_only_the_path_of_a_token_is_written_down(start, tmp_path):
    file = tmp_path / "project" / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    server = start("GuessSpec", f"tokens={file}")
    status, _, err = run("add", "guarded", server.url)
    assert status == 2
    assert "asks for a token" in err
    assert "token_file" in err
    assert run("add", "guarded", server.url, "--token-file", "token")[0] == 0
    written = (tmp_path / "config/envgym/environments.yaml").read_text()
    assert yaml.safe_load(written)["environments"]["guarded"] == {"urls": [server.url], "token_file": str(file)}
    assert TOKEN not in written
    spec = registry.spec("guarded")
    assert TOKEN not in spec.to_json() + repr(vars(spec))
    file.chmod(0o644)
    status, _, err = run("add", "again", server.url, "--token-file", "token")
    assert (status, "can be read by others" in err) == (2, True)
    assert TOKEN not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["math_verify", "http://127.0.0.1:1/x"], "is installed here"),
        (["no where", "http://127.0.0.1:1/x"], "malformed"),
        (["game.py", "http://127.0.0.1:1/x"], "reads as a file"),
        (["far", "127.0.0.1:8000"], "not a usable URL"),
        (["far", "http://me:pass@127.0.0.1:8000/x"], "no user or password"),
        (["far", "http://127.0.0.1:1/x"], "connection refused"),
        (["far", "http://127.0.0.1:1/x", "timeout=3"], "timeout=3: not a usable URL"),
        (["far", "http://127.0.0.1:1/x", "--token-file", "none"], "No such file"),
    ],
)
def test_what_cannot_be_added_is_one_line_and_leaves_nothing(words, said, tmp_path):
    status, _, err = run("add", *words)
    assert (status, err.count("\n")) == (2, 1)
    assert said in err
    assert "pass@" not in err
    assert not (tmp_path / "config").exists()


def test_a_file_of_names_that_is_broken_stands_in_nobodys_way(tmp_path):
    Path("envgym.yaml").write_text("environments: {far: {url: http://127.0.0.1:1/x}}")
    with pytest.raises(ConfigError, match=r"envgym.yaml: unknown key 'environments.far.url'. Did you mean 'urls'"):
        registry.spec("far")
    assert registry.spec("math_verify").id.startswith("math_verify")


def test_a_relative_token_file_counts_from_the_file_that_names_it(tmp_path):
    Path("envgym.yaml").write_text("environments: {far: {urls: ['http://127.0.0.1:1/x'], token_file: keys/far}}")
    assert registry.spec("far").config.token_file == tmp_path / "project" / "keys" / "far"


def test_a_name_is_a_member_of_a_mixture(game):
    assert run("add", "numbers", f"{game.url}/game")[0] == 0

    async def main() -> None:
        members = {"near": {"env": "math_verify"}, "far": {"env": "numbers"}}
        async with registry.spec("mixture", members=members) as spec:
            tasks = [await spec.tasks("train").get(index) for index in range(8)]
            task = next(task for task in tasks if task.env == "far")
            env = spec.of(task).make()
            observation, _ = await env.reset(seed=1, options={"task": task})
            assert observation.messages[0].text == "Guess."
            await env.close()

    asyncio.run(main())
