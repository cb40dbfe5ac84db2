"""Reward functions in files, and groups of given completions."""

import asyncio
import sys
import tempfile
import textwrap

import pytest

from envgym import registry
from envgym.agents.token_level import MultiTurn
from envgym.engine import Generation, SamplingParams
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import StopReason, Task

TASK = Task("t", prompt="What is 40 + 2?", answer="42", fields={"hint": "add", "level": 3})


@pytest.fixture(autouse=True)
def own_registry(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of what goes wrong are kept


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="brevity.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


@pytest.fixture
def play(tiny_model):
    """Rolls out groups whose members have these completions: by default none, one and two words."""
    renderer = make_renderer("auto", load_tokenizer(str(tiny_model)))

    def run(spec, tasks=(TASK,), texts=("", "word", "word word")):
        class Says:
            async def generate(self, request):
                text = texts[int(request.id.split(":")[1])]
                token_ids = (*renderer.tokenizer.encode(text, add_special_tokens=False), renderer.stop_token_ids[0])
                return Generation(token_ids, (-0.5,) * len(token_ids), StopReason.STOP, ())

        async def main():
            async with spec:
                drawn = [await spec.tasks("train").get(0)] if tasks is None else list(tasks)
                config = RolloutConfig(retries=0, refills=0)
                agent = MultiTurn(renderer, MultiTurn.Config())
                runner = Runner(spec, agent, Says(), config, max_model_len=512, seed=0, deterministic=False)
                return await runner.roll_out(drawn, SamplingPlan("p", SamplingParams(64), len(texts)))

        return asyncio.run(asyncio.wait_for(main(), 60))

    return run
