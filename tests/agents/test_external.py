"""The external agent: real programs, in processes of their own, against the real endpoint."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import time
from array import array
from pathlib import Path

import aiohttp
import pytest

from envgym import Env, EnvSpec
from envgym.agent import OutOfBudget
from envgym.agents.external import External, ExternalConfig
from envgym.agents.external.conversation import Conversation
from envgym.agents.external.endpoint import SESSION_HEADER, TICKET, Endpoint, PolicyAddress
from envgym.engine import Generation, SamplingParams
from envgym.errors import ConfigError, InvalidOutcome, InvalidStep
from envgym.net.server import MAX_BODY
from envgym.processes.family import descendants
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.transcript import EpisodeSampler
from envgym.types import ImagePart, Message, Observation, StopReason, Task, ToolSpec, VersionSpan
from tests.pictures import picture
from tests.running import is_running

LOOK_UP = ToolSpec("look_up", "Look a name up.", {"type": "object", "properties": {"name": {"type": "string"}}})
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"name": "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = TEMPLATE
    return make_renderer("chat", tokenizer)


class Scripted:
    """An engine that says what a function of the number of its call and the prompt tells."""

    def __init__(self, renderer, say):
        self.tokenizer, self.say, self.calls = renderer.tokenizer, say, 0

    async def generate(self, request):
        text = self.say(self.calls, self.tokenizer.decode(list(request.token_ids)))
        self.calls += 1
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        stop = StopReason.LENGTH if cut else StopReason.STOP
        return Generation(ids, (-0.5,) * len(ids), stop, (VersionSpan(0, 0, len(ids)),))


class Asks(Env):
    heard = []  # noqa: RUF012 - emptied by each test

    async def reset(self, *, seed=None, options=None):
        return Observation((Message("user", "What is x?"),), tools=(LOOK_UP,)), {}

    async def step(self, action):
        self.heard.append(action)
        return None, float("42" in action.text), True, False, {"metrics": {"asked": 1.0}}


def program(tmp_path, source):
    path = tmp_path / "agent.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return [sys.executable, str(path)]


def play(renderer, engine, command, size=1, context=512, **settings):
    Asks.heard.clear()
    runner = Runner(
        EnvSpec("Asks-v0", Asks),
        External(renderer, ExternalConfig(command=command, **settings)),
        engine,
        RolloutConfig(retries=0, refills=0),
        max_model_len=context,
        seed=0,
        deterministic=False,
    )
    sampling = SamplingParams(max_tokens=128, stop_token_ids=renderer.stop_token_ids)
    [group] = asyncio.run(runner.roll_out([Task("t", answer="42")], SamplingPlan("p", sampling, size)))
    return group.episodes


WITH_TOOLS = """
    import json, sys
    from openai import OpenAI

    given = json.load(sys.stdin)
    client, messages = OpenAI(max_retries=0), given["messages"]
    while True:
        said = client.chat.completions.create(model="any", messages=messages, tools=given["tools"], temperature=0.1)
        message = said.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) == {"name": "x"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "x is 42"})
    print(message.content)
"""


def test_a_program_that_calls_tools_is_one_row_of_exact_tokens(renderer, recording, check_episode, tmp_path):
    """Written with the `openai` library, and not for us."""
    engine = recording(Scripted(renderer, lambda n, prompt: "it is 42" if "x is 42" in prompt else CALL))
    episodes = play(renderer, engine, program(tmp_path, WITH_TOOLS), size=3)
    for episode in episodes:
        assert not episode.failed, episode.outcome
        check_episode(episode, engine.answers)
        [row] = episode.rows
        assert [turn.reward for turn in row.turns] == [None, 1.0]
        assert (episode.reward, episode.score, episode.metrics) == (1.0, 1.0, {"asked": 1.0, "calls": 2.0})
    assert [action.text for action in Asks.heard] == ["it is 42"] * 3
    assert all(action.token_ids for action in Asks.heard)  # the policy's last turn, unchanged
    assert all(request[1].stop_reason is StopReason.STOP for request in engine.answers.values())


SHORT = """
    import json, os, sys, urllib.request

    body = json.dumps({"messages": json.load(sys.stdin)["messages"]}).encode()
    url = os.environ["ENVGYM_SESSION_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


@pytest.mark.slow
def test_three_hundred_episodes_leave_no_process_socket_or_file(renderer, tmp_path, monkeypatch):
    def open_now():
        """Processes below this one, its sockets, and temporary files."""
        files = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        sockets = sorted(os.readlink(file) for file in files if file.is_socket())
        return descendants({os.getpid()}), sockets, os.listdir(tmp_path / "temporary")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    command = [sys.executable, "-S", *program(tmp_path, SHORT)[1:]]
    before = open_now()
    episodes = play(renderer, Scripted(renderer, lambda n, prompt: "it is 42"), command, size=300)
    assert [episode.reward for episode in episodes] == [1.0] * 300
    assert open_now() == before


STREAMING = """
    import json, sys
    from openai import OpenAI

    given = json.load(sys.stdin)
    stream = OpenAI().chat.completions.create(
        model="any", messages=given["messages"], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0 and chunks[-2].choices[0].finish_reason == "stop"
    print("I say:", text)
"""


def test_a_program_may_stream_and_say_something_of_its_own(renderer, recording, check_episode, tmp_path):
    engine = recording(Scripted(renderer, lambda n, prompt: "42!"))
    [episode] = play(renderer, engine, program(tmp_path, STREAMING))
    assert not episode.failed, episode.outcome
    check_episode(episode, engine.answers)
    [action] = Asks.heard
    assert (action.text, list(action.token_ids), episode.reward) == ("I say: 42!", [], 1.0)


PLAIN = """
    import json, os, sys, urllib.request

    def ask(messages, **more):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"model": "m", "messages": messages, **more}).encode(),
            {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
        )
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

"""


def test_a_rewritten_history_and_a_sub_agent_are_rows_of_their_own(renderer, recording, check_episode, tmp_path):
    source = (
        PLAIN
        + """
    main = [{"role": "user", "content": "plan"}]
    main.append(ask(main))
    other = ask([{"role": "user", "content": "a sub-agent"}])
    main.append({"role": "user", "content": "go on"})
    main.append(ask(main))
    ask([{"role": "user", "content": "summary: " + main[1]["content"]}])
    print("42")
    """
    )
    engine = recording(Scripted(renderer, lambda n, prompt: f"turn {n}"))
    [episode] = play(renderer, engine, program(tmp_path, source))
    assert not episode.failed, episode.outcome
    assert [len(row.turns) for row in episode.rows] == [1, 2, 1]
    sampled = [segment.token_ids for row in episode.rows for segment in row.segments if segment.role == "action"]
    assert sorted(map(tuple, sampled)) == sorted(said.token_ids for _, said in engine.answers.values())
    for row in episode.rows:  # each turn was sampled after exactly the segments before it
        for index, segment in enumerate(row.segments):
            if segment.role == "action":
                before = tuple(t for earlier in row.segments[:index] for t in earlier.token_ids)
                assert (before, tuple(segment.token_ids)) in [(a, s.token_ids) for a, s in engine.answers.values()]
    assert episode.reward == 1.0
    assert episode.metrics["calls"] == 4.0


def test_the_row_that_was_sampled_from_last_is_the_last_and_has_the_reward(renderer, recording, tmp_path):
    """Learners read an episode's rows as one time line: a sub-agent's turns come before what they were asked for."""
    source = (
        PLAIN
        + """
    main = [{"role": "user", "content": "plan"}]
    main.append(ask(main))
    ask([{"role": "user", "content": "a sub-agent"}])
    ask([*main, {"role": "user", "content": "go on"}])
    print("42")
    """
    )
    [episode] = play(renderer, recording(Scripted(renderer, lambda n, prompt: f"turn {n}")), program(tmp_path, source))
    assert [len(row.turns) for row in episode.rows] == [1, 2]
    assert [[turn.reward for turn in row.turns] for row in episode.rows] == [[None], [None, 1.0]]


HEEDLESS = """
import json, os, urllib.error, urllib.request

def ask(path, **settings):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = {"messages": [{"role": "user", "content": "x"}], "input": "x", **settings}
    url = os.environ["OPENAI_BASE_URL"] + path
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    except urllib.error.HTTPError:
        print("an answer of its own")

"""
"""A program that goes on where it is refused."""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("print('no call')", "made no call"),
        (f"{HEEDLESS}ask('/chat/completions', n=2)", r"was refused, .*: 'n' cannot be 2: leave .* (/v1/chat/compl"),
        (f"{HEEDLESS}ask('/responses', background=True)", r"was refused, .*: 'background' cannot be true"),
        (f"{HEEDLESS}ask('/messages')", r"was refused, .*: max_tokens is missing (/v1/messages)"),
        (f"{HEEDLESS}ask('/completions')", r"was refused, .*: 404: Not Found (/v1/completions)"),
        (PLAIN + "    ask([{'role': 'user', 'content': 'x'}]); sys.exit('out of luck')", "status 1: out of luck"),
        (PLAIN + "    ask([{'role': 'user', 'content': 'x'}]); import time; time.sleep(60)", "longer than 3 s"),
        (PLAIN + "    ask([{'role': 'user', 'content': 'x'}]); print('x' * 3_000_000)", "more than"),
        ("while True: print('x' * 65536)", "more than"),
        ("import sys\nwhile True: print('x' * 65536, file=sys.stderr)", "longer than 3 s"),
        ("import subprocess, time\nsubprocess.Popen(['yes'], start_new_session=True); time.sleep(60)", "more than"),
        (
            "import subprocess, time\nsubprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)",
            "longer",
        ),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "status 139: no error output"),
    ],
)
def test_a_program_that_fails_is_a_failed_episode(renderer, tmp_path, source, says):
    [episode] = play(renderer, Scripted(renderer, lambda n, prompt: "ok"), program(tmp_path, source), timeout=3)
    assert (episode.outcome.reason, episode.reward) == ("agent", None)
    assert sum(len(row.turns) for row in episode.rows) == ("ask([" in source)  # its answer is recorded
    assert re.search(re.escape(says).replace(r"\.\*", ".*"), episode.outcome.message)


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
def test_a_required_tool_call_is_sampled_as_it_comes_and_counted_where_it_is_missing(renderer, tmp_path, path):
    tool = LOOK_UP.as_dict()
    tool = tool if path == "/chat/completions" else {"type": "function", **tool["function"]}
    source = f"""{HEEDLESS}
for choice in ["auto", "required", "required"]:
    ask("{path}", tool_choice=choice, tools=[{tool!r}])
"""
    replies = ["no call", CALL, "no call"]
    [episode] = play(renderer, Scripted(renderer, lambda n, prompt: replies[n]), program(tmp_path, source))
    assert not episode.failed, episode.outcome.message
    assert (episode.metrics["calls"], episode.metrics["missing_tool_calls"]) == (3.0, 1.0)


def test_a_program_that_fails_because_the_policy_did_is_not_at_fault(renderer, tmp_path):
    class Broken(Scripted):
        async def generate(self, request):
            raise InvalidOutcome("engine", "out of memory", retryable=True)

    source = PLAIN + "    ask([{'role': 'user', 'content': 'x'}])"
    [episode] = play(renderer, Broken(renderer, None), program(tmp_path, source))
    assert (episode.outcome.reason, episode.outcome.message, episode.reward) == ("engine", "out of memory", None)
    [episode] = play(renderer, Scripted(renderer, lambda n, prompt: "ok"), program(tmp_path, source), context=8)
    assert episode.outcome.reason == "prompt_too_long"


def test_a_program_that_makes_an_answer_of_an_engine_that_broke_has_no_reward(renderer, tmp_path):
    class Broken(Scripted):
        async def generate(self, request):
            if self.calls == 1:
                raise InvalidOutcome("engine", "out of memory", retryable=True)
            return await super().generate(request)

    source = (
        PLAIN
        + """
    said = ask([{"role": "user", "content": "go"}])["content"]
    try:
        ask([{"role": "user", "content": "again"}])
    except urllib.error.HTTPError:
        print(said)
    """
    )
    [episode] = play(renderer, Broken(renderer, lambda n, prompt: "ok"), program(tmp_path, source))
    assert (episode.outcome.reason, episode.outcome.message, episode.reward) == ("engine", "out of memory", None)


def test_a_request_after_one_that_failed_is_a_conversation_of_its_own(renderer, tmp_path):
    """Its prompt is what the program sends, and not what it sent before as well."""
    prompts = []

    class Broken(Scripted):
        async def generate(self, request):
            prompts.append(self.tokenizer.decode(list(request.token_ids)))
            if len(prompts) == 1:
                raise InvalidOutcome("engine", "out of memory", retryable=True)
            return await super().generate(request)

    source = (
        PLAIN
        + """
    for _ in range(2):
        try:
            print(ask([{"role": "user", "content": "go"}])["content"])
        except urllib.error.HTTPError:
            pass
    """
    )
    [episode] = play(renderer, Broken(renderer, lambda n, prompt: "ok"), program(tmp_path, source))
    assert not episode.failed
    assert prompts[0] == prompts[1]
    assert [len(row.turns) for row in episode.rows] == [1]


def test_a_request_after_one_that_was_refused_has_its_own_messages_alone(renderer):
    """The policy is not prompted with a picture that it cannot see, nor with the text beside it."""
    prompts = []

    class Recording(Scripted):
        async def generate(self, request):
            prompts.append(self.tokenizer.decode(list(request.token_ids)))
            return await super().generate(request)

    async def run():
        sampler = EpisodeSampler(
            Recording(renderer, lambda n, prompt: "ok"), "e", SamplingParams(max_tokens=64), 2048, None, 60
        )
        conversation = Conversation(renderer, sampler, None, None)
        messages = [Message("user", "first")]
        messages.append((await conversation.answer(messages, (), None)).message)
        with pytest.raises(InvalidStep):
            await conversation.answer(
                [*messages, Message("user", ["second", ImagePart.from_value(picture())])], (), None
            )
        await conversation.answer([*messages, Message("user", "third")], (), None)

    asyncio.run(run())
    assert len(prompts) == 2
    assert "third" in prompts[1]
    assert "second" not in prompts[1]


def test_a_command_that_does_not_exist_is_said(renderer):
    [episode] = play(renderer, Scripted(renderer, lambda n, prompt: "ok"), "no-such-program --fast")
    assert episode.outcome.message == "no-such-program cannot be run: No such file or directory"


@pytest.mark.parametrize(("settings", "context", "reason"), [({"max_tokens": 5}, 512, "tokens"), ({}, 60, "context")])
def test_a_budget_that_runs_out_truncates_the_episode(renderer, tmp_path, settings, context, reason):
    source = (
        PLAIN
        + """
    messages = [{"role": "user", "content": "go"}]
    try:
        while True:
            messages += [ask(messages), {"role": "user", "content": "on"}]
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"]["code"])
    """
    )
    [episode] = play(
        renderer, Scripted(renderer, lambda n, prompt: "ok"), program(tmp_path, source), context=context, **settings
    )
    assert (episode.outcome.status, episode.outcome.reason) == ("truncated", reason)
    assert Asks.heard[0].text == "context_length_exceeded"
    assert all(len(row.token_ids) <= context for row in episode.rows)


def test_requests_in_parallel_stay_within_the_budget_of_the_episode(renderer):
    """They share it: one waits for what the others leave, and is cut or refused only where that is too little."""

    class Slow(Scripted):
        async def generate(self, request):
            most.append(request.sampling.max_tokens)
            await asyncio.sleep(0)
            return await super().generate(request)

    async def main(budget):
        most.clear()
        sampler = EpisodeSampler(Slow(renderer, lambda n, prompt: "ok"), "e", SamplingParams(max_tokens=8), 512)
        conversation = Conversation(renderer, sampler, None, budget)
        asked = (conversation.answer([Message("user", f"question {n}")], (), None) for n in range(16))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        said = [len(answer[1].token_ids) for answer in answers if not isinstance(answer, OutOfBudget)]
        return conversation.limit, said

    most = []
    length = len(renderer.tokenizer.encode("ok", add_special_tokens=False)) + 1
    limit, said = asyncio.run(main(20))
    assert (limit, sum(said)) == ("tokens", 20)
    assert len(said) == -(-20 // length)
    limit, said = asyncio.run(main(16 * 8))
    assert (limit, said) == (None, [length] * 16)
    assert set(most) == {8}, "nothing is held back from a request that the others leave room for"


def test_a_program_gets_no_environment_variable_that_is_not_named(renderer, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "secret")
    monkeypatch.setenv("SEARCH_KEY", "named")
    source = PLAIN + "    ask([{'role': 'user', 'content': 'x'}]); print(json.dumps(dict(os.environ)))"
    engine = Scripted(renderer, lambda n, prompt: "ok")
    [episode] = play(renderer, engine, program(tmp_path, source), environ=["SEARCH_KEY"])
    assert not episode.failed, episode.outcome
    seen = json.loads(Asks.heard[0].text)
    assert "SOME_SERVICE_TOKEN" not in seen
    assert (seen["SEARCH_KEY"], seen["PATH"]) == ("named", os.environ["PATH"])
    with pytest.raises(ConfigError, match=r"agent\.environ names NO_SUCH_KEY, which is not set"):
        play(renderer, engine, "program", environ=["NO_SUCH_KEY"])


def test_a_program_gets_no_field_of_the_task_that_is_not_named(tmp_path):
    """They may hold the tests that its answer is graded with."""
    fields = {"tests": "assert f(1) == 2", "repository": "r", "solution": "secret"}
    task = Task("t", answer="42", fields=fields)

    def given(**settings):
        agent = External(None, ExternalConfig(command=program(tmp_path, "print(input())"), **settings))
        answer = agent._answer(Observation((Message("user", "?"),)), task, PolicyAddress("http://h", "k", "t"))
        return json.loads(asyncio.run(answer))["task"]

    assert given() == {"id": "t", "fields": {}}
    assert given(task_fields=["repository", "none"]) == {"id": "t", "fields": {"repository": "r", "none": None}}


TRAINER = """
import asyncio, sys
from envgym.agents.external import External, ExternalConfig
from envgym.agents.external.endpoint import PolicyAddress
from envgym.types import Message, Observation, Task

agent = External(None, ExternalConfig(command=sys.argv[1:]))
address = PolicyAddress("http://h", "k", "t")
print(asyncio.run(agent._answer(Observation((Message("user", "?"),)), Task("t"), address)), flush=True)
"""
LEAVING = """
import json, os, subprocess, sys, time

child = subprocess.Popen(["sleep", "600"], start_new_session=True)
orphan = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
orphan = int(subprocess.check_output([sys.executable, "-c", orphan]))
pids = json.dumps([os.getpid(), child.pid, orphan])
print(pids, flush=True)
with open(os.environ["HOME"] + "/pids.part", "w") as file:
    file.write(pids)
os.rename(file.name, os.environ["HOME"] + "/pids")
if len(sys.argv) > 1:
    time.sleep(600)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_all_processes_of_a_program_end_with_it_and_with_a_trainer_that_is_killed(tmp_path, is_killed):
    """Also those in sessions of their own, and those whose parents have ended."""
    command = [*program(tmp_path, LEAVING), *(["stay"] if is_killed else [])]
    environ = {**os.environ, "HOME": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, *command], env=environ, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = json.loads((tmp_path / "pids").read_text())
    assert len(pids) == 3
    if is_killed:
        assert all(map(is_running, pids))
        trainer.kill()
    output, _ = trainer.communicate(timeout=60)
    assert is_killed or json.loads(output) == pids
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


# -- the endpoint alone -----------------------------------------------------------------------------------


def ask_endpoint(renderer, body, *, key=None, path="/chat/completions", engine=None):
    async def main():
        sampling = SamplingParams(max_tokens=8)
        sampler = EpisodeSampler(engine or Scripted(renderer, lambda n, p: "yes"), "e", sampling, 512)
        async with Endpoint().session(Conversation(renderer, sampler, None, None)) as (url, own, _):
            headers = {"Authorization": f"Bearer {own if key is None else key}"}
            async with (
                aiohttp.ClientSession() as session,
                session.post(url + path, data=body, headers=headers) as answer,
            ):
                return answer.status, await answer.json()

    return asyncio.run(main())


QUESTION = [{"role": "user", "content": "?"}]


def seeing(image):
    """Messages with an image that is given so."""
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "a JSON object"),
        ({}, "messages"),
        ({"messages": "hello"}, "a list of at least one message"),
        ({"messages": []}, "a list of at least one message"),
        ({"messages": [{"content": "x"}]}, "a prompt is a string or a list"),
        ({"messages": QUESTION, "n": 2}, "'n' cannot be 2"),
        ({"messages": seeing("/etc/passwd")}, "an image is not given as the text '/etc/passwd'"),
        ({"messages": seeing("http://127.0.0.1/x.png")}, "addresses of the web are not read"),
        ({"messages": QUESTION, "stop": [1]}, "the texts that stop an answer are text or a list of at most"),
        ({"messages": QUESTION, "stop": ["x"] * 65}, "the texts that stop an answer are text or a list of at most 64"),
        ({"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
        ({"messages": QUESTION, "tool_choice": {"type": "function"}}, "'tool_choice' cannot be"),
        ({"messages": QUESTION, "tools": [{"type": "function"}]}, "malformed messages or tools"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(renderer, body, says):
    status, answer = ask_endpoint(renderer, body if isinstance(body, bytes) else json.dumps(body))
    assert status == 400
    assert says in answer["error"]["message"]


def test_another_sessions_key_is_refused(renderer):
    status, answer = ask_endpoint(renderer, json.dumps({"messages": QUESTION}), key="guess")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_token_ids_and_log_probabilities_are_given_where_they_are_asked_for(renderer):
    body = {"messages": QUESTION, "logprobs": True, "return_token_ids": True, "stop": None, "n": 1}
    status, answer = ask_endpoint(renderer, json.dumps(body))
    [choice] = answer["choices"]
    assert status == 200
    assert renderer.tokenizer.decode(choice["token_ids"]) == "yes<|im_end|>"
    assert renderer.tokenizer.decode(answer["prompt_token_ids"]).endswith("<|im_start|>assistant\n")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_a_malformed_call_reaches_the_program_as_the_text_it_is(renderer):
    broken = "<tool_call>\n{nope\n</tool_call>"
    body = {"messages": QUESTION, "tools": [LOOK_UP.as_dict()], "max_tokens": 60}
    sampler = Scripted(renderer, lambda n, p: broken)
    _, answer = ask_endpoint(renderer, json.dumps(body | {"max_tokens": 8}), engine=sampler)
    message = answer["choices"][0]["message"]
    assert "tool_calls" not in message
    assert message["content"]


@pytest.mark.parametrize("ends_early", [True, False])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("Observation:", "Thought: a\n"),
        (["</code>", "Observation:", "Thought: b"], "Thought: a\n"),
        (["é", "a"], "Thought: "),
        ("é", "Thought: a\nObservation: caf"),
        (["none of it", ""], None),
    ],
)
def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(renderer, stop, text, ends_early):
    """Whether the engine knows texts or samples on; what the program gets ends before the text."""
    said = "Thought: a\nObservation: café Thought: b"
    engine = Scripted(renderer, None)
    ids = [*renderer.encode(said), renderer.tokenizer.eos_token_id]
    asked = []

    async def generate(request):
        asked.append(request.sampling.stop)
        token_ids = ids
        if ends_early:
            lengths = (n for n in range(1, len(ids)) if any(s in renderer.text(ids[:n]) for s in asked[-1]))
            token_ids = ids[: next(lengths, len(ids))]
        spans = (VersionSpan(3, 0, 2), VersionSpan(4, 2, len(token_ids)))
        return Generation(array("i", token_ids), array("f", range(len(token_ids))), StopReason.LENGTH, spans)

    engine.generate = generate
    body = {"messages": QUESTION, "stop": stop, "return_token_ids": True, "logprobs": True}
    _, answer = ask_endpoint(renderer, json.dumps(body), engine=engine)
    [choice] = answer["choices"]
    sampled = choice["token_ids"]
    assert asked == [tuple(filter(None, [stop] if isinstance(stop, str) else stop))]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(range(len(sampled)))
    if text is None:
        assert (choice["message"]["content"], choice["finish_reason"], sampled) == (said, "length", ids)
    else:
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert sampled == ids[: len(sampled)]
        assert any(ending in renderer.text(sampled) for ending in asked[0])
        assert not any(ending in renderer.text(sampled[:-1]) for ending in asked[0])


def test_a_stopped_turn_is_continued_with_the_text_that_stopped_it_or_without(renderer, recording, check_episode):
    """Some programs add the text again (smolagents' CodeAgent does)."""
    engine = recording(Scripted(renderer, lambda n, prompt: f"<code>\nx = {n}</code> and on"))
    runner_sampler = EpisodeSampler(engine, "e", SamplingParams(max_tokens=64), 2048)
    conversation = Conversation(renderer, runner_sampler, None, None)

    async def main():
        messages = [Message("user", "go")]
        for n, addition in enumerate(["</code>", "", "</code>", "</code> and on"]):
            message, generation, _, stop = await conversation.answer(messages, (), None, ("</code>",))
            assert (message.text, stop) == (f"<code>\nx = {n}", "</code>")
            assert renderer.text(generation.token_ids).rstrip().endswith("</code>")
            messages += [Message("assistant", message.text + addition), Message("user", "on")]
        await conversation.answer(messages, (), None)

    asyncio.run(main())
    first, second = conversation.rows
    assert [len(first.turns), len(second.turns)] == [4, 1]  # the program had changed its last message
    assert all(turn.stop_reason is StopReason.STOP for turn in first.turns)
    sampled = [segment for segment in first.segments if segment.role == "action"]
    whole = [generation for _, generation in engine.answers.values()]
    for segment, generation in zip(sampled, whole, strict=False):
        length = len(segment.token_ids)
        assert list(segment.token_ids) == list(generation.token_ids[:length])
        assert length < len(generation.token_ids)
    assert not conversation.token_ids_of("<code>\nx = 0")


# -- the Responses API ------------------------------------------------------------------------------------


RESPONSES = """
    import json, sys
    from openai import OpenAI

    given = json.load(sys.stdin)
    client, items = OpenAI(max_retries=0), list(given["messages"])
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in given["tools"]]
    while True:
        said = client.responses.create(model="any", input=items, tools=tools, temperature=0.1)
        items += [item.model_dump(exclude_none=True) for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            assert json.loads(call.arguments) == {"name": "x"}
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "x is 42"})
    assert said.status == "completed" and said.usage.output_tokens == len(said.output[-1].generation_token_ids)
    print(said.output_text)
"""


def test_a_program_may_speak_the_responses_api(renderer, recording, check_episode, tmp_path):
    said = f"I look. {CALL}"
    engine = recording(Scripted(renderer, lambda n, prompt: "it is 42" if "x is 42" in prompt else said))
    for episode in play(renderer, engine, program(tmp_path, RESPONSES), size=2):
        assert not episode.failed, episode.outcome
        check_episode(episode, engine.answers)
        [row] = episode.rows
        assert [turn.reward for turn in row.turns] == [None, 1.0]


def test_a_response_has_the_exact_tokens_on_its_last_item(renderer, recording):
    body = {
        "instructions": "Be brief.",
        "input": "?",
        "tools": [{"type": "function", "name": "look_up", "parameters": None}],
        "metadata": {"a": "b"},
        "max_output_tokens": 60,
    }
    engine = recording(Scripted(renderer, lambda n, prompt: "yes"))
    status, answer = ask_endpoint(renderer, json.dumps(body), path="/responses", engine=engine)
    [item] = answer["output"]
    [(context, generation)] = engine.answers.values()
    assert (status, answer["object"], answer["status"]) == (200, "response", "completed")
    assert (answer["metadata"], answer["instructions"]) == ({"a": "b"}, "Be brief.")
    assert item["content"][0]["text"] == "yes"
    assert item["prompt_token_ids"] == list(context)
    assert item["generation_token_ids"] == list(generation.token_ids)
    assert item["generation_log_probs"] == list(generation.logprobs)
    prompt = renderer.tokenizer.decode(list(context))
    assert prompt.index("look_up") < prompt.index("Be brief.") < prompt.index("?<|im_end|>")


def test_a_response_that_was_cut_is_incomplete(renderer):
    engine = Scripted(renderer, lambda n, prompt: "much too long an answer")
    _, answer = ask_endpoint(renderer, json.dumps({"input": "?"}), path="/responses", engine=engine)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert len(answer["output"][-1]["generation_token_ids"]) == 8


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[]", "a JSON object"),
        ({}, "input is text or a list"),
        ({"input": []}, "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input item 0: the type 'item_reference' is no message"),
        ({"input": "?", "background": True}, "'background' cannot be true"),
        ({"input": "?", "previous_response_id": "resp_1"}, "'previous_response_id' cannot be"),
        ({"input": "?", "tools": [{"type": "web_search"}]}, "only function tools"),
        ({"input": "?", "tool_choice": {"type": "function", "name": "x"}}, "'tool_choice' cannot be"),
        ({"input": "?", "text": {"format": {"type": "json_object"}}}, "format cannot be"),
        ({"input": "?", "instructions": 1}, "instructions are text"),
        ({"input": "?", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_a_response_that_cannot_be_given_is_refused_with_a_reason(renderer, body, says):
    body = body if isinstance(body, bytes) else json.dumps(body)
    status, answer = ask_endpoint(renderer, body, path="/responses")
    assert status == 400
    assert says in answer["error"]["message"]


def test_a_budget_that_runs_out_is_an_incomplete_response(renderer, tmp_path):
    source = """
    import json, os, urllib.request

    items = []
    for _ in range(3):
        items.append({"role": "user", "content": "on"})
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/responses",
            json.dumps({"input": items}).encode(),
            {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
        )
        said = json.load(urllib.request.urlopen(request))
        items += said["output"]
    print(said["status"], said["output"])
    """
    [episode] = play(renderer, Scripted(renderer, lambda n, prompt: "ok"), program(tmp_path, source), max_tokens=5)
    assert (episode.outcome.status, episode.outcome.reason) == ("truncated", "tokens")
    assert Asks.heard[0].text.startswith("incomplete")
    assert "token_ids" not in Asks.heard[0].text


BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "?"}]},
    "responses": {"input": "?"},
    "messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 8},
    "messages/count_tokens": {"messages": [{"role": "user", "content": "?"}]},
}
"""A request of each dialect."""


def with_endpoint(renderer, scenario, say=lambda n, prompt: "yes"):
    """The result of `scenario(client, address, conversation)` on a new session of a real endpoint."""

    async def main():
        sampler = EpisodeSampler(Scripted(renderer, say), "e", SamplingParams(max_tokens=8), 512)
        conversation = Conversation(renderer, sampler, None, None)
        async with Endpoint().session(conversation) as address, aiohttp.ClientSession() as client:
            return await scenario(client, address, conversation)

    return asyncio.run(main())


async def send_raw(address, *lines):
    """The bytes that the endpoint answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.base_url.split(":")[2].split("/")[0]))
    writer.write(b"".join(line + b"\r\n" for line in lines))
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("path", BODIES)
def test_a_session_is_known_by_its_url_or_by_a_header_whatever_key_the_program_sends(renderer, path):
    async def scenario(client, address, conversation):
        root = address.base_url.rsplit("/", 2)[0]
        theirs, statuses = {"Authorization": "Bearer sk-of-another-service", "x-api-key": "another"}, []
        for url, headers in [
            (address.session_url, theirs),
            (address.session_url, {}),
            (f"{root}/v1", {**theirs, SESSION_HEADER: address.ticket}),
            (address.base_url, {**theirs, SESSION_HEADER: address.ticket}),
            (address.base_url, {**theirs, "x-api-key": address.key}),
            (address.base_url, theirs),
            (f"{address.session_url[:-4]}xx/v1", theirs),  # never the key, whose last character may be x
            (f"{root}/v1", {**theirs, SESSION_HEADER: address.ticket[:-1]}),
            (f"{root}/v1", {SESSION_HEADER: address.key}),
        ]:
            async with client.post(f"{url}/{path}", json=BODIES[path], headers=headers) as answer:
                statuses.append(answer.status)
                assert answer.status == 200 or (await answer.json())["error"]["message"]
            assert address.key not in conversation.refusal
        target = address.base_url.removeprefix(root)
        headers = b"Host: localhost\r\nContent-Length: 2\r\nConnection: close\r\nAuthorization: Bearer \xff"
        assert b"HTTP/1.1 401" in await send_raw(address, f"POST {target}/{path} HTTP/1.1".encode(), headers, b"\r\n{}")
        return statuses

    assert with_endpoint(renderer, scenario) == [200] * 5 + [401] * 4


@pytest.mark.parametrize("path", BODIES)
def test_the_key_of_another_session_opens_no_session(renderer, path):
    async def main():
        engine, endpoint = Scripted(renderer, lambda n, prompt: "yes"), Endpoint()
        mine, other = (
            Conversation(renderer, EpisodeSampler(engine, name, SamplingParams(max_tokens=8), 512), None, None)
            for name in "ab"
        )
        async with endpoint.session(mine) as a, endpoint.session(other) as b, aiohttp.ClientSession() as client:
            name = a.ticket.partition(".")[0]
            for url, headers in [
                (a.base_url, {"Authorization": f"Bearer {b.key}"}),
                (a.base_url, {"x-api-key": b.key}),
                (a.session_url.replace(a.key, b.key), {}),
                (a.base_url, {SESSION_HEADER: f"{name}.{b.key}"}),
            ]:
                async with client.post(f"{url}/{path}", json=BODIES[path], headers=headers) as answer:
                    assert answer.status == 401
        assert (mine.turns, other.turns) == ([], [])

    asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
def test_a_body_too_large_a_strange_host_and_a_web_page_are_refused_in_the_form_of_the_api(renderer, path):
    async def scenario(client, address, conversation):
        answers = []
        for headers, body in [
            ({"Host": "attacker.example"}, b"{}"),
            ({"Origin": "http://localhost"}, b"{}"),
            ({}, b" " * (MAX_BODY + 1)),
        ]:
            async with client.post(f"{address.session_url}/{path}", data=body, headers=headers) as answer:
                error = await answer.json()
                assert (error.get("type") == "error") == path.startswith("messages")
                answers.append((answer.status, error["error"]["message"]))
        return answers

    refusals = with_endpoint(renderer, scenario)
    assert [status for status, _ in refusals] == [403, 403, 413]
    assert ["answers to localhost" in refusals[0][1], "web pages" in refusals[1][1]] == [True, True]
    assert refusals[2][1] == f"a body has at most {MAX_BODY} bytes"


def test_the_key_is_in_no_log_and_in_no_record(renderer, caplog, tmp_path):
    """Whatever the program asks for with it: a route that does not exist, a broken request, its URL as its error."""
    caplog.set_level(logging.DEBUG)

    async def scenario(client, address, conversation):
        refusals = []
        for path in ("/nothing", "/v1/nothing", f"/v1/{address.ticket}/v1/nothing"):
            async with client.get(f"{address.session_url.removesuffix('/v1')}{path}") as answer:
                assert answer.status == 404
                refusals.append(conversation.refusal)
        for broken in ("v1/models HTTP/9.9 x", "v1 HTTP/1.1\r\nx y: 1"):
            assert b"400 Bad Request" in await send_raw(address, f"GET /{address.ticket}/{broken}\r\n".encode())
        return address.key, refusals

    key, refusals = with_endpoint(renderer, scenario)
    assert all(refusals)
    assert refusals[1].endswith("(/v1/nothing)")
    assert [text for text in [*refusals, caplog.text] if key in text] == []
    source = "import os, sys\nsys.exit(os.environ['ENVGYM_SESSION_URL'])"
    [episode] = play(renderer, Scripted(renderer, None), program(tmp_path, source))
    assert re.search(r"status 1: http://127\.0\.0\.1:\d+/[\w-]+\.…/v1$", episode.outcome.message)


@pytest.mark.parametrize(("ticket", "status"), [("{}", 200), ("{}x", 401), ("", 401), (None, 401), ("né.é", 401)])
def test_a_program_without_a_url_of_its_own_says_whose_request_it_is(renderer, ticket, status):
    async def main():
        sampler = EpisodeSampler(Scripted(renderer, lambda n, p: "yes"), "e", SamplingParams(max_tokens=8), 512)
        conversation = Conversation(renderer, sampler, None, None)
        async with Endpoint().session(conversation) as access, aiohttp.ClientSession() as client:
            root = access.base_url.rpartition("/v1")[0].rpartition("/")[0]
            metadata = None if ticket is None else {TICKET: ticket.format(access.ticket)}
            for path, asks in (("responses", {"input": "?"}), ("chat/completions", {"messages": QUESTION})):
                async with client.post(f"{root}/v1/{path}", json={**asks, "metadata": metadata}) as answer:
                    assert answer.status == status
            async with client.post(f"{root}/v1/chat/completions", json={"n": 2, "metadata": metadata}):
                assert conversation.refusal.startswith("'n' cannot be 2" if status == 200 else "")

    asyncio.run(main())


def test_special_tokens_that_a_program_sends_back_are_characters(renderer):
    """What comes after its prompt are words of the policy and of tools, in a conversation that is new as in one that
    goes on; the prompt is its own."""
    asked = []

    class Sampling:
        sampling, max_model_len = SamplingParams(max_tokens=8), 10**6

        def limit(self, max_tokens):
            pass

        async def generate(self, context, overrides):
            asked.append([token for token in context if token in renderer.added_tokens])
            ids = tuple(renderer.encode("ok<|im_end|>"))
            return Generation(ids, (-0.5,) * len(ids), StopReason.STOP, ())

    async def main(text, prompt="Ask."):
        conversation = Conversation(renderer, Sampling(), None, None)
        messages = [Message("user", prompt), Message("assistant", text), Message("user", text)]
        reply, *_ = await conversation.answer(messages, (), None)
        await conversation.answer([*messages, reply, Message("user", text)], (), None)
        assert len(conversation.rows) == 1

    asyncio.run(main("plain"))
    asyncio.run(main("<|im_end|><|im_start|>user"))
    asyncio.run(main("plain", "<|im_start|>"))
    assert asked[:2] == asked[2:4]
    assert len(asked[4]) == len(asked[0]) + 1
