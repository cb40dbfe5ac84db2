"""Files for OpenRLHF, played through the real runner by a policy whose answers are written down."""

import asyncio
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from envgym import registry
from envgym.engine import Generation, SamplingParams
from envgym.registry import load_component
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import StopReason, Task, VersionSpan

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "openrlhf"))
from seeds import VARIABLE, document_file, documents  # noqa: E402


class Scripted:
    """A policy that answers with `answers(member, turn)`, as tokens of a real tokenizer that merges.

    Where a turn's limit is shorter than the answer, it is cut there.
    """

    def __init__(self, renderer, answers):
        self.renderer = renderer
        self.answers = answers
        self.requests = []

    def prompts(self, member=0):
        """What the policy was shown, turn by turn, as text."""
        ours = [request for request in self.requests if f":{member:03d}:" in request.id]
        return [self.renderer.tokenizer.decode(list(request.token_ids)) for request in ours]

    async def generate(self, request):
        self.requests.append(replace(request, token_ids=request.token_ids[:]))  # the context grows
        name, _, turn = request.id.rpartition(".")
        text = self.answers(int(name.split(":")[1]), int(turn))
        token_ids = [*self.renderer.tokenizer.encode(text, add_special_tokens=False), self.renderer.stop_token_ids[0]]
        reason = StopReason.STOP
        if len(token_ids) > request.sampling.max_tokens:
            token_ids, reason = token_ids[: request.sampling.max_tokens], StopReason.LENGTH
        logprobs = tuple(-0.5 - 0.001 * position for position in range(len(token_ids)))
        await asyncio.sleep(0)
        return Generation(tuple(token_ids), logprobs, reason, (VersionSpan(3, 0, len(token_ids)),))


@pytest.fixture(scope="session")
def renderer(tiny_model):
    return make_renderer("auto", load_tokenizer(str(tiny_model)))


@pytest.fixture
def play(renderer, recording, tmp_path, monkeypatch):
    """`play(file, tasks, answers, …)`: the groups of a rollout, and the engine. `env` are settings of the environment,
    others of the rollout."""

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of what goes wrong are kept

    def run(file, tasks, answers, *, size=2, env=None, agent=None, context=4096, sampling=None, deterministic=False,
            agent_settings=None, **rollout):  # fmt: skip
        engine = recording(Scripted(renderer, answers if callable(answers) else lambda member, turn: answers))

        rows = tmp_path / "rows.jsonl"  # the tasks that are played are given
        rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

        async def main():
            async with registry.spec(str(file), data={"path": str(rows)}, **(env or {})) as spec:
                agent_class = load_component("agent", agent or spec.agent)
                runner = Runner(
                    spec,
                    agent_class(renderer, agent_class.Config(**(agent_settings or {}))),
                    engine,
                    RolloutConfig(**{"retries": 0, "refills": 0, **rollout}),
                    max_model_len=context,
                    seed=0,
                    deterministic=deterministic,
                )
                params = SamplingParams(
                    **{"max_tokens": 256, "stop_token_ids": renderer.stop_token_ids, **(sampling or {})}
                )
                return await runner.roll_out(tasks, SamplingPlan("p", params, size))

        return asyncio.run(asyncio.wait_for(main(), 120)), engine

    return run


@pytest.fixture
def ok(check_episode):
    """`ok(groups, engine)`: the finished episodes, each of which keeps the invariants."""

    def check(groups, engine):
        episodes = [episode for group in groups for episode in group.episodes]
        assert [episode.outcome.message for episode in episodes if episode.failed] == []
        for episode in episodes:
            check_episode(episode, engine.answers)
        return episodes

    return check


@pytest.fixture
def write(tmp_path):
    """`write(text, name)`: a file for OpenRLHF, in a folder of the test's."""

    def file(text, name="agent_func.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return file


@pytest.fixture(params=["ours", pytest.param("documents", marks=pytest.mark.slow)])
def shown(request, tmp_path):
    """`shown(name)`: a file of `files`, and one of the same interface as a document of the project's shows it."""
    if request.param == "ours":
        return lambda name: HERE / "files" / f"{name}.py"
    if not documents():
        pytest.skip(f"{VARIABLE} names no folder")

    def write(name):
        path = tmp_path / f"{name}.py"
        path.write_text(document_file(name))
        return path

    return write


def task(prompt="What is 40 + 2?", answer="42", id="t"):
    return Task(id, prompt=prompt, answer=answer)


@pytest.fixture(name="task")
def task_fixture():
    return task
