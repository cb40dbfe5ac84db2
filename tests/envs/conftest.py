"""What the tests of other frameworks share: addresses for their servers, and episodes that their programs run."""

import asyncio
import contextlib
import socket
import tempfile

import pytest

from envgym.engine import SamplingParams
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan

from tests.agents.test_external import TEMPLATE  # isort: skip


@pytest.fixture(scope="session")
def free_ports():
    """`free_ports(count)`: ports of this machine at which nothing listens."""

    def free_ports(count):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for free in sockets:
                free.bind(("127.0.0.1", 0))
            return [free.getsockname()[1] for free in sockets]

    return free_ports


@pytest.fixture(scope="module")
def renderer(tiny_model):
    """Renders messages, and calls of tools in tags."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = TEMPLATE
    return make_renderer("chat", tokenizer)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(scope="session")
def roll_out_tasks():
    """`roll_out_tasks(spec, agent, engine, places, …)`: an episode of each training task at these places, after which
    the environment is closed."""

    def roll_out_tasks(spec, agent, engine, places, *, context, max_tokens):
        async def run():
            async with spec:
                config = RolloutConfig(retries=0, refills=0)
                runner = Runner(spec, agent, engine, config, max_model_len=context, seed=0, deterministic=False)
                sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=agent.renderer.stop_token_ids)
                tasks = [await spec.tasks("train").get(place) for place in places]
                groups = await runner.roll_out(tasks, SamplingPlan("p", sampling, 1))
                return [episode for group in groups for episode in group.episodes]

        return asyncio.run(run())

    return roll_out_tasks
