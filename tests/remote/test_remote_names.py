"""Names for remote environments: given on the command line, they stand wherever an environment does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import envgym
from envgym import registry, remote_names
from envgym.errors import ConfigError, NameNotFound
from envgym.evaluation.suite import find_suite
from envgym.jobs.evaluation import new_evaluation, run_evaluation
from envgym.jobs.folder import JobFolder, find_folder
from envgym.monitoring.display import Display
from envgym.training.new_model import make_model

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
    assert "250 train tasks" in out
    assert "agent multi_turn there, tool_calling here" in out
    assert "game: Guess a number drawn" in out
    assert str(Path(__file__).parent) not in out
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
    assert remote_names.read_all()["numbers"].urls == (game.url, f"{other.url}/game")
    assert run("remove", "numbers")[0] == 0
    assert remote_names.read_all()["numbers"].urls == (f"{game.url}/game",)


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
        (["far", "http://me:pass@127.0.0.1:99999/x"], "no user or password"),
        (["far", "http://127.0.0.1:99999/x"], "not a usable URL"),
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
    with pytest.raises(
        ConfigError, match=r"envgym.yaml: unknown key 'environments.far.url'. Did you mean 'environments.far.urls'"
    ):
        registry.spec("far")
    assert registry.spec("math_verify").id.startswith("math_verify")


def test_a_broken_file_hides_neither_what_is_installed_nor_the_nearest_name(game, tmp_path):
    remote_names.save("user", "numbers", remote_names.NamedEnvironment(urls=(f"{game.url}/game",)))
    Path("envgym.yaml").write_text("environments: {far: {url: http://127.0.0.1:1/x}}")
    status, out, err = run("list")
    assert status == 0
    listed = [line.split()[0] for line in out.splitlines()]
    assert {"math_verify-v0", "numbers"} <= set(listed)
    assert f"remote: {game.url}/game" in out
    assert err.count("\n") == 1
    assert "unknown key 'environments.far.url'" in err
    with pytest.raises(
        ConfigError, match=r"no environment 'math_verfy' here. Did you mean 'math_verify'\? But .*far.url"
    ):
        registry.spec("math_verfy")
    with pytest.raises(ConfigError, match=r"far\.url"):  # the project may mean another one
        registry.spec("numbers")
    assert registry.spec("numbers", urls=[game.url]).config.urls == (game.url,)
    status, out, err = run("add", "more", f"{game.url}/game", "--user")
    assert (status, "added more" in out, "far.url" in err) == (0, True, True)
    assert run("add", "more", f"{game.url}/game", "--project")[0] == 2
    assert "far: {url:" in Path("envgym.yaml").read_text()


def test_a_name_has_either_versions_or_none(game):
    remote_names.save("user", "far", remote_names.NamedEnvironment(urls=(f"{game.url}/game",)))
    status, _, err = run("add", "far-v2", f"{game.url}/game", "--project")
    assert (status, "beside 'far': give all of a name's ids a version, or none" in err) == (2, True)
    entries = {"far-v2": {"urls": ["http://127.0.0.1:1/x"]}, "far": {"urls": ["http://127.0.0.1:2/x"]}}
    Path("envgym.yaml").write_text(yaml.safe_dump({"environments": entries}))  # by hand
    assert registry.spec("far").config.urls == ("http://127.0.0.1:2/x",)
    assert registry.spec("far-v2").config.urls == ("http://127.0.0.1:1/x",)


def test_other_urls_of_a_name_are_shown_its_token():
    Path("envgym.yaml").write_text(
        "environments: {far: {urls: ['http://127.0.0.1:1/x'], token_file: /keys/far, ca_file: /keys/ca}}"
    )
    config = registry.spec("far", urls=["http://127.0.0.1:2/x"]).config
    assert config.urls == ("http://127.0.0.1:2/x",)
    assert (config.token_file, config.ca_file) == (Path("/keys/far"), Path("/keys/ca"))
    assert registry.spec("elsewhere", urls=["http://127.0.0.1:2/x"]).config.token_file is None


def test_other_entries_stay_as_they_are():
    file = Path("envgym.yaml")
    others = "small: {urls: ['http://127.0.0.1:1/x'], token_file: keys/c, ca_file: ~/ca.pem}"
    file.write_text(f"# of our lab\nenvironments: {{{others}}}")
    remote_names.save("project", "mine", remote_names.NamedEnvironment(urls=("http://127.0.0.1:3/x",)))
    mine = {"mine": {"urls": ["http://127.0.0.1:3/x"]}}
    assert yaml.safe_load(file.read_text()) == {"environments": {**yaml.safe_load(others), **mine}}
    remote_names.save("project", "mine", remote_names.NamedEnvironment(urls=("http://127.0.0.1:4/x",)))
    assert remote_names.read("project")["mine"].urls == ("http://127.0.0.1:4/x",)
    remote_names.save("project", "mine", None)
    assert yaml.safe_load(file.read_text()) == {"environments": yaml.safe_load(others)}
    remote_names.save("project", "small", None)
    assert remote_names.read("project") == {}
    remote_names.save("project", "mine", remote_names.NamedEnvironment(urls=("http://127.0.0.1:3/x",)))
    assert set(remote_names.read("project")) == {"mine"}


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
            env = spec.spec_for(task).make()
            observation, _ = await env.reset(seed=1, options={"task": task})
            assert observation.messages[0].text == "Guess."
            await env.close()

    asyncio.run(main())


def test_a_mixtures_fingerprint_is_of_what_is_served_and_not_of_where(start):
    first, second = start("Dice"), start("Dice")

    async def fingerprint(url: str, **settings: Any) -> dict[str, str]:
        members = {"near": {"env": "math_verify"}, "far": {"env": url, **settings}}
        async with registry.spec("mixture", members=members) as spec:
            return spec.fingerprint()

    async def main() -> None:
        found = await fingerprint(first.url)
        assert await fingerprint(second.url) == found
        heavier = await fingerprint(second.url, weight=2)
        assert (heavier["code"], heavier["spec"] == found["spec"]) == (found["code"], False)

    asyncio.run(main())


def test_a_suite_with_a_name_and_a_mixture_of_it_is_evaluated_and_gone_on_with(start, tiny_model):
    assert run("add", "far", start("Dice").url)[0] == 0
    mixture = "{name: mixture, members: {far: far, near: math_verify}}"
    Path("own.yaml").write_text(f"tasks: 3\nenvironments: {{alone: far, both: {{env: {mixture}}}}}\n")
    settings = {"model": str(tiny_model), "engine": {"kind": "transformers"}, "debug": True, "name": "first"}
    _, suite, _ = find_suite("own.yaml")
    evaluation = new_evaluation({**settings, "rollout": {"max_tokens": 4}}, suite=suite)
    first = run_evaluation(evaluation, Display(), make_model)
    assert (first["status"], first["n_episodes"], first["failures"]) == ("completed", 6, {})
    folder = JobFolder(Path("evals/first"))
    lines = folder.journal.path.read_text().splitlines(keepends=True)
    folder.journal.path.write_text("".join(lines[:2]))  # as a kill leaves it
    folder.result_file.unlink()
    again = run_evaluation(find_folder("first", "evals"), Display(), make_model)
    assert folder.journal.path.read_text().splitlines(keepends=True)[:2] == lines[:2]
    assert (again["n_episodes"], again["failures"]) == (6, {})
    assert {name: env["fingerprints"] for name, env in again["envs"].items()} == {
        name: env["fingerprints"] for name, env in first["envs"].items()
    }
