"""The real verifiers, and small environments on its SDK (`environments`), which are on the path as modules."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

import envgym
from envgym.engine import SamplingParams
from envgym.envs.verifiers import VerifiersAgent
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan

from tests.agents.test_external import TEMPLATE  # isort: skip

ENVIRONMENTS = Path(__file__).with_name("environments")


@pytest.fixture(scope="module")
def renderer(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = TEMPLATE
    return make_renderer("chat", tokenizer)


@pytest.fixture(autouse=True)
def temporary(verifiers_package, tmp_path, monkeypatch):
    """The folder of temporary files; the home folder is one too."""
    for name, folder in {"TMPDIR": tmp_path / "temporary", "HOME": tmp_path / "home"}.items():
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    path = [str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return tmp_path / "temporary"


@pytest.fixture
def specify(verifiers_package):
    """`specify(name, **settings)`: the environment of verifiers."""
    return lambda name, **settings: envgym.spec(f"verifiers:{name}", python=verifiers_package[0], **settings)


@pytest.fixture
def roll_out(specify, renderer):
    """`roll_out(name, engine, places, …)`: an episode of each task at these places of the taskset."""

    def roll_out(name, engine, places=(0,), *, context=512, max_tokens=128, agent=None, **settings):
        async def run():
            spec = specify(name, test_fraction=0, **settings)
            async with spec:
                player = VerifiersAgent(renderer, VerifiersAgent.Config(**(agent or {})))
                config = RolloutConfig(retries=0, refills=0)
                runner = Runner(spec, player, engine, config, max_model_len=context, seed=0, deterministic=False)
                sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=renderer.stop_token_ids)
                tasks = [await spec.tasks("train").get(place) for place in places]
                groups = await runner.roll_out(tasks, SamplingPlan("p", sampling, 1))
                return [episode for group in groups for episode in group.episodes]

        return asyncio.run(run())

    return roll_out
