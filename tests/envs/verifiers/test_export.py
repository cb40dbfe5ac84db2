"""envgym's environments as packages for verifiers: `vf-eval` gives the rewards that the environments give here."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

import envgym
from envgym.render.tool_calls import parse_api_call
from envgym.types import Action, StopReason, observed_messages

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "verifiers.md"
PRODUCT = ("envgym", "envs", "agents", "learners", "pyproject.toml", "README.md", "LICENSE")
FILES = {
    "failing.py": """
import envgym


@envgym.reward(tasks=[{"prompt": "1 and 2"}])
def fails(completion):
    raise RuntimeError("a bug")
""",
    "groups.py": """
import envgym


class One(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return "x", {}

    async def step(self, action):
        return None, 1.0, True, False, {}


class Groups(envgym.EnvSpec):
    env_class = One

    async def score_group(self, task, episodes):
        return [1.0 for _ in episodes]
""",
}


def reply(messages, tools):
    """A policy: the text of its answer, and its calls as names and arguments. It is wrong for some tasks."""
    first = next(message for message in messages if message["role"] == "user")
    if "Guess 1-30" in first["content"]:  # by halves
        low, high, guess = 1, 30, 0
        for message in messages:
            if message["role"] == "assistant":
                guess = int(message["content"])
            low, high = (guess + 1, high) if message["content"] == "higher" else (low, high)
            high = guess - 1 if message["content"] == "lower" else high
        return str((low + high) // 2), []
    if tools:
        [key] = re.findall(r"\d+", first["content"])[-1:]
        if messages[-1]["role"] != "tool":
            return "", [("get", '{"key": ' if int(key) % 5 == 0 else json.dumps({"key": key}))]
        return messages[-1]["content"], []
    a, b = map(int, re.findall(r"\d+", first["content"])[:2])
    return f"\\boxed{{{a + b - (b == 3)}}}", []


async def play(spec, count, split="train"):
    """The reward of each of the first tasks, and whether it is truncated, with the same policy."""
    results = []
    for index in range(count):
        async with spec.make() as env:
            task = await spec.tasks(split).get(index)
            observation, _ = await env.reset(seed=index, options={"task": task})
            messages, tools, rewards, ends = [], (), [], False
            while not ends:
                tools = observation.tools or tools
                messages += [message.as_dict(arguments_as_text=True) for message in observed_messages(observation)]
                text, calls = reply(messages, tools)
                calls = [parse_api_call(*call, tools) for call in calls]
                messages.append({"role": "assistant", "content": text})
                action = Action(text, tool_calls=tuple(calls), stop_reason=StopReason.STOP)
                observation, reward, terminated, truncated, _ = await env.step(action)
                rewards += [] if reward is None else [reward]
                ends = terminated or truncated or spec.agent == "single_turn"
            results.append((sum(rewards), not terminated))
    return results


async def complete(request):
    """The policy's answer to a request of chat completions."""
    body = await request.json()
    text, calls = reply(body["messages"], body.get("tools"))
    message = {"role": "assistant", "content": text or None}
    if calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        message["tool_calls"] = [
            {"id": f"call_{len(body['messages'])}", "type": "function", "function": function} for function in functions
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return web.json_response(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


@pytest.fixture(scope="module")
def installed(verifiers_package, tmp_path_factory):
    """`installed(*folders)`: a virtual environment with what verifiers' has, envgym's wheel, and those of projects."""
    python, variables = verifiers_package
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("venv")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PRODUCT]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).exists():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, sources / name, follow_symlinks=False)
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/*/site-packages")
    [theirs] = python.parents[1].glob("lib/*/site-packages")
    (packages / "verifiers.pth").write_text(f"{theirs}\n")

    def install(*projects):
        wheels = tmp_path_factory.mktemp("wheels")
        pip = [sys.executable, "-m", "pip"]
        quietly = ["--quiet", "--disable-pip-version-check", "--no-deps"]
        for command in (
            [*pip, "wheel", *quietly, "--no-build-isolation", "--wheel-dir", wheels, *projects],
            [*pip, "--python", folder / "bin" / "python", "install", *quietly, wheels],
        ):
            words = [*command[:-1], *wheels.glob("*.whl")] if command[-1] == wheels else command
            done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
        return folder / "bin" / "python"

    install(sources)
    return install


@pytest.fixture
def evaluated(installed, verifiers_package, serving, tmp_path, run):
    """`evaluated(words, *options)`: export by a command, install, and run `vf-eval`: the records of its episodes."""

    def evaluate(words, *options):
        exported = run(*words)
        assert exported.returncode == 0, exported.stderr
        [project] = [words[n + 1] for n, word in enumerate(words) if word == "--out"]
        python = installed(tmp_path / project)
        _, command = exported.stdout.strip().splitlines()[-2:]
        program, module, *rest = shlex.split(command)
        assert program == "vf-eval"

        async def main():
            async with serving(complete) as url:
                known = {"URL": f"{url}/v1", "MODEL": "m"}
                rest_of_it = [known.get(word, word) for word in rest]
                code = "from verifiers.v1.cli.eval.main import main; main()"
                ran = await asyncio.create_subprocess_exec(
                    python, "-c", code, module, *rest_of_it, "--no-rich", "--output-dir", tmp_path / "out", *options,
                    env={**verifiers_package[1], "HOME": os.environ["HOME"], "TMPDIR": os.environ["TMPDIR"]},
                    cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                )  # fmt: skip
                _, errors = await ran.communicate()
                assert ran.returncode == 0, errors.decode()[-3000:]

        asyncio.run(main())
        [file] = (tmp_path / "out").rglob("traces.jsonl")
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return sorted(records, key=lambda record: record["task"]["data"]["idx"])

    return evaluate


def rewards_of(records):
    traces = [trace for record in records for trace in record["traces"]]
    assert all(record["ok"] for record in records), [record["errors"] for record in records]
    return [(trace["rewards"]["reward"]["score"], trace["stop_condition"] == "max_turns") for trace in traces]


def locally(name, count, split="train", **settings):
    async def main():
        async with envgym.spec(name, **settings) as spec:
            return await play(spec, count, split)

    return asyncio.run(main())


def test_rewards_under_vf_eval_are_those_of_the_environment(evaluated, tmp_path):
    """One turn, with a file of tasks."""
    rows = tmp_path / "rows.jsonl"
    tasks = [{"prompt": f"What is {n} + 3?", "answer": str(n + n % 2 + 2)} for n in range(6)]
    rows.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    command = r"^```console\nenvgym (envs export math_verify .*?)^```$"
    [words] = re.findall(command, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    words = [word.replace("/path/to/rows.jsonl", str(rows)) for word in shlex.split(words)]
    records = evaluated([*words, "data.test_fraction=0"])
    expected = locally("math_verify", 4, data={"path": str(rows), "test_fraction": 0})
    assert rewards_of(records) == expected
    assert {reward for reward, _ in expected} == {0.0, 1.0}
    assert all("answered" in record["traces"][0]["metrics"] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "count"), [("guess.py:Guess", {}, 12), ("tool_use", {}, 8), ("tool_use", {"max_calls": 1}, 4)]
)
def test_turns_and_tools_under_vf_eval(evaluated, tmp_path, name, settings, count):
    shutil.copy(ROOT / "examples" / "guess.py", tmp_path)
    words = [f"env.{key}={value}" for key, value in settings.items()]
    records = evaluated(["envs", "export", name, "--as", "verifiers", "--out", "project", *words], "-n", str(count))
    assert rewards_of(records) == locally(name, count, **settings)
    assert len(records) == count
    roles = [node["message"]["role"] for node in records[0]["traces"][0]["nodes"]]
    assert roles[-1] == "assistant"


@pytest.mark.slow
def test_a_failure_of_the_environment_is_no_reward(evaluated, tmp_path):
    (tmp_path / "failing.py").write_text(FILES["failing.py"])
    [record] = evaluated(["envs", "export", "failing.py", "--as", "verifiers", "--out", "project"])
    assert not record["ok"]
    assert "a bug" in record["errors"][0]["message"]
    assert record["traces"][0]["rewards"] == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["serve", "math_verify", "--dialect", "verifiers"],
            "verifiers has no protocol to serve",
        ),
        (["envs", "export", "groups.py", "--as", "verifiers", "--out", "x"], "judges groups of episodes"),
        (["envs", "export", "verifiers:glossary", "--as", "verifiers", "--out", "x"], "but by the agent verifiers"),
        (["envs", "export", "math_verify", "--as", "nemo_gym", "--out", "x"], "nemo_gym has no projects to export to"),
    ],
)
def test_what_cannot_be_given_is_one_line(run, tmp_path, words, says):
    (tmp_path / "groups.py").write_text(FILES["groups.py"])
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
