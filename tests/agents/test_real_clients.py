"""The clients that people have, unchanged, on the endpoint: OpenAI's and Anthropic's libraries and LiteLLM, as streams
or whole, with tools or without. The policy is the starter on the real vLLM; where it is to call tools, it is scripted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from array import array
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import pytest

from envgym.agents.external.conversation import Conversation
from envgym.agents.external.endpoint import Endpoint
from envgym.engine import Generation, SamplingParams
from envgym.engines import choose_engine
from envgym.engines.spec import EngineSpec
from envgym.processes.local import LocalRuntime
from envgym.render import load_tokenizer, make_renderer
from envgym.transcript import EpisodeSampler
from envgym.types import Outcome, StopReason, Task, VersionSpan

from . import clients

STARTER = Path(__file__).parents[2] / "envgym" / "config" / "recipes" / "starter"
LIBRARIES = ("openai_chat", "openai_responses", "anthropic_messages")
QUESTIONS = ["What is 3 + 4?", "And 5 + 6?"]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"name": "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer():
    return make_renderer("chat", load_tokenizer(str(STARTER)))


@pytest.fixture(scope="module")
def loop():
    """An event loop of its own thread: the clients block the test's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def vllm(loop, tmp_path_factory):
    """The starter on vLLM, one for all tests."""

    class Engine:
        """A worker's engine, as a run calls it."""

        async def generate(self, request):
            return await worker.call(lambda engine: engine.generate(request))

        async def score(self, token_ids):
            return await worker.call(lambda engine: engine.score(token_ids))

    async def start():
        arguments = {"spec": EngineSpec(str(STARTER), max_model_len=512, dtype="float32")}
        return await runtime.start(choose_engine("vllm")[0], arguments, name="vllm", environ={"OMP_NUM_THREADS": "1"})

    async def make_runtime():
        return LocalRuntime(tmp_path_factory.mktemp("logs"))

    runtime = asyncio.run_coroutine_threadsafe(make_runtime(), loop).result()
    worker = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield Engine()
    asyncio.run_coroutine_threadsafe(runtime.close(), loop).result()


class Scripted:
    """An engine that calls the tool until it has read the result."""

    def __init__(self, renderer):
        self.renderer = renderer

    async def generate(self, request):
        prompt = self.renderer.tokenizer.decode(request.token_ids)
        text = "it is 42" if clients.RESULT in prompt else f"I look.\n{CALL}"
        ids = array("i", [*self.renderer.encode(text), self.renderer.tokenizer.eos_token_id])
        return Generation(ids, array("f", [-0.5] * len(ids)), StopReason.STOP, (VersionSpan(0, 0, len(ids)),))


class Policy:
    """A policy behind the endpoint: `open` begins an episode, `close` ends it and returns it."""

    def __init__(self, loop, renderer, engine):
        self.loop, self.renderer, self.engine = loop, renderer, engine
        self.endpoint = None
        self.number = 0

    @asynccontextmanager
    async def session(self, **sampling):
        self.endpoint = self.endpoint or Endpoint()
        self.number += 1
        name = f"e{self.number}"
        params = SamplingParams(**{"max_tokens": 64, "stop_token_ids": self.renderer.stop_token_ids, **sampling})
        sampler = EpisodeSampler(self.engine, name, params, 512, seed=self.number)
        conversation = Conversation(self.renderer, sampler, None, None)
        async with self.endpoint.session(conversation) as address:
            yield name, conversation, address

    def wait_for(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def play(self, talk, **sampling):
        """The episode of `talk(address)`, which runs in this thread, and its result."""
        session = self.session(**sampling)
        name, conversation, address = self.wait_for(session.__aenter__())
        try:
            result = talk(address)
        finally:
            self.wait_for(session.__aexit__(None, None, None))
        episode = conversation.episode(Task("t"), Outcome.finish(), 1.0, {}, conversation.messages)
        episode.id = name
        return episode, result


def check_turns(renderer, episode, turns):
    """The client has exactly the texts of the recorded turns, all of one sequence."""
    [row] = episode.rows
    sampled = [segment for segment in row.segments if segment.role == "action"]
    assert len(sampled) == len(turns)
    for segment, (text, calls) in zip(sampled, turns, strict=True):
        whole = renderer.text(segment.token_ids)
        assert text.strip() == (whole.partition("<tool_call>")[0] if calls else whole).strip()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("client", "streams", "tools"), product(LIBRARIES, [False, True], [False, True]))
def test_what_a_library_gets_from_vllm_are_the_recorded_tokens(
    loop, renderer, vllm, recording, check_episode, client, streams, tools
):
    engine = recording(vllm)
    policy = Policy(loop, renderer, engine)
    episode, turns = policy.play(
        lambda address: clients.play(client, address.base_url, address.key, streams, tools, QUESTIONS)
    )
    check_episode(episode, engine.answers)
    check_turns(renderer, episode, turns)
    [row] = episode.rows
    scored, start = policy.wait_for(vllm.score(tuple(row.token_ids.tolist()))), 0
    for segment in row.segments:
        end = start + len(segment)
        if segment.role == "action":
            assert list(segment.logprobs) == pytest.approx(scored[start - 1 : end - 1], abs=1e-3)
        start = end


def ask_with_stop(client, address, stop):
    """The text of an answer, the reason it ended, and its tokens as the client got them."""
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    asked = {"model": "policy", "messages": messages, "max_tokens": 48, "extra_body": {"return_token_ids": True}}
    if client == "openai_chat":
        openai = pytest.importorskip("openai").OpenAI(base_url=address.base_url, api_key=address.key, max_retries=0)
        [choice] = openai.chat.completions.create(**asked, stop=stop).choices
        return choice.message.content, choice.finish_reason, choice.token_ids
    anthropic = pytest.importorskip("anthropic").Anthropic(
        base_url=address.base_url.removesuffix("/v1"), api_key=address.key, max_retries=0
    )
    message = anthropic.messages.create(**asked, stop_sequences=stop)
    assert message.stop_sequence == (stop[-1] if stop else None)
    return "".join(block.text for block in message.content), message.stop_reason, message.generation_token_ids


@pytest.mark.parametrize(("client", "reason"), [("openai_chat", "stop"), ("anthropic_messages", "stop_sequence")])
def test_vllm_ends_a_turn_with_the_token_that_completes_a_stop_text(loop, renderer, vllm, recording, client, reason):
    unstopped = {"temperature": 1.5, "stop_token_ids": ()}
    episode, (text, *_) = Policy(loop, renderer, vllm).play(
        lambda address: ask_with_stop(client, address, []), **unstopped
    )
    ids = list(episode.rows[0].segments[1].token_ids)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    engine = recording(vllm)
    again, answer = Policy(loop, renderer, engine).play(  # with the same seed
        lambda address: ask_with_stop(client, address, ["never said", stop]), **unstopped
    )
    sampled = list(again.rows[0].segments[1].token_ids)
    assert answer == (text.partition(stop)[0], reason, sampled)
    assert (sampled, stop in renderer.text(sampled)) == (ids[: len(sampled)], True)
    assert stop not in renderer.text(sampled[:-1])
    [(_, generation)] = engine.answers.values()
    assert list(generation.token_ids) == sampled  # vLLM has sampled no more


@pytest.mark.parametrize(("client", "streams"), product(LIBRARIES, [False, True]))
def test_a_library_calls_tools(loop, renderer, recording, check_episode, client, streams):
    engine = recording(Scripted(renderer))
    episode, turns = Policy(loop, renderer, engine).play(
        lambda address: clients.play(client, address.base_url, address.key, streams, True, ["What is x?"])
    )
    assert [(text.strip(), calls) for text, calls in turns] == [
        ("I look.", [["look_up", {"name": "x"}]]),
        ("it is 42", []),
    ]
    check_episode(episode, engine.answers)
    check_turns(renderer, episode, turns)


def play_all(package, conversations):
    """The turns of conversations that LiteLLM's own environment plays."""
    python, variables = package
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [python, clients.__file__]
    done = subprocess.run(
        command, input=json.dumps(conversations), env=variables | offline, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", ["litellm_chat", "litellm_messages"])
def test_litellm_gets_the_recorded_tokens_and_calls_tools(
    loop, renderer, vllm, recording, check_episode, litellm_package, client
):
    """Its two ways here: as for OpenAI's service and as for Anthropic's."""
    for given, tools, questions in [(vllm, False, QUESTIONS), (Scripted(renderer), True, ["What is x?"])]:
        for streams in (False, True):
            engine = recording(given)
            episode, [turns] = Policy(loop, renderer, engine).play(
                lambda at: play_all(litellm_package, [[client, at.base_url, at.key, streams, tools, questions]])  # noqa: B023
            )
            check_episode(episode, engine.answers)
            check_turns(renderer, episode, turns)
            assert [calls for _, calls in turns] == ([[["look_up", {"name": "x"}]], []] if tools else [[], []])
