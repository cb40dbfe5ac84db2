"""The Hugging Face hub where there is no network: one line in bounded time, and what was fetched before serves."""

import asyncio
import socket

import datasets
import pytest
from aiohttp import web
from huggingface_hub import constants

from envgym import hub
from envgym.config.resolve import resolve
from envgym.errors import ConfigError, DataError
from envgym.jobs.models import fetch_model
from envgym.monitoring.display import Display
from envgym.openrlhf.rows import write_rows
from envgym.tasks.rows import open_rows
from envgym.training.new_model import make_model


class Phases(Display):
    def __init__(self):
        self.texts = []

    def phase(self, text):
        self.texts.append(text)


@pytest.fixture
def hub_at(monkeypatch, tmp_path):
    """`hub_at(url)`: the hub is there, and nothing has been fetched from it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def place(url):
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

    return place


@pytest.fixture
def silent_hub(hub_at, monkeypatch):
    """A hub that takes connections and never answers."""
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # which is set where the hub is silent
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub_at(f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


def find(name):
    phases = Phases()
    return asyncio.run(fetch_model(name, resolve({"env": "math_verify"}), phases, make_model)), phases


def test_a_hub_that_never_answers_is_given_up_in_one_line(silent_hub, caplog):
    with pytest.raises(ConfigError, match=r"no model folder org/name here, and .* hub cannot be reached .*a folder"):
        find("org/name")
    with pytest.raises(DataError, match=r"no file org/data, and no data set .* be loaded: the hub cannot be reached"):
        open_rows("org/data")
    [told] = [record.getMessage() for record in caplog.records if record.name == "envgym.tasks.hub"]
    assert told.startswith("looking for org/data on the Hugging Face hub, for up to ")


def test_a_model_that_was_fetched_before_needs_no_network(silent_hub, tmp_path):
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_text("0" * 40)
    place, phases = find("org/name")
    assert place == str(snapshot)
    with pytest.raises(ConfigError, match=f"model {snapshot}: its tokenizer"):  # rows of what it plays look there too
        write_rows(tmp_path / "episodes.jsonl", tmp_path / "out.jsonl", "org/name", lambda rows: rows, chat=True)
    assert phases.texts == ["looking for org/name on the Hugging Face hub, for up to 0.2 s (there is no folder here)"]


@pytest.mark.parametrize(("status", "reached"), [(200, True), (401, True), (404, True), (503, False)])
def test_a_hub_that_answers_is_left_to_its_library(status, reached, hub_at, serving):
    async def answer(request):
        return web.Response(status=status)

    async def ask():
        async with serving(answer) as url:
            hub_at(url)
            return await asyncio.to_thread(hub.ask_hub, "org/name", "config.json")

    assert (asyncio.run(ask()) == "") is reached


def test_a_file_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("model.gguf", "sub/model.safetensors"):
        (tmp_path / name).write_text("x")
        for given in (name, f"./{name}", str(tmp_path / name)):
            with pytest.raises(ConfigError, match=rf"{name} is a file, and a model is the folder"):
                find(given)
    (tmp_path / "sub" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"Did you mean sub\?"):
        find("sub/config.json")
