"""Tasks of Harbor, a policy that gives commands from a list, and Harbor's program that plays them."""

import contextlib
import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import envgym

WORKER = Path(envgym.__file__).parent / "envs" / "harbor" / "worker.py"
READY = '[ "$(cat /app/answer.txt)" = ready ] && score=1 || score=0\necho $score > /logs/verifier/reward.txt\n'


@pytest.fixture
def make_task(tmp_path):
    """`make_task(name)`: the folder of a task that wants `ready` in a file, with other files by their paths."""

    def make_task(name="ready", *, toml="", image="FROM debian:12\nWORKDIR /app\n", test=READY, files=None):
        folder = tmp_path / "tasks" / name
        texts = {
            "task.toml": f'schema_version = "1.4"\n{toml}',
            "instruction.md": "Write ready to /app/answer.txt.\n",
            "environment/Dockerfile": image,
            "tests/test.sh": f"#!/bin/bash\n{test}",
            "solution/solve.sh": "#!/bin/bash\necho ready > /app/answer.txt\n",
            **(files or {}),
        }
        for path, text in texts.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return folder

    return make_task


class Policy(ThreadingHTTPServer):
    """A policy with a list of commands for each session. `said` has what it was told after each."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.commands = {}
        self.said = {}

    def add(self, *commands):
        """The URL of a session in which the policy gives these commands."""
        session = f"session-{len(self.commands)}"
        self.commands[session], self.said[session] = commands, []
        return f"http://127.0.0.1:{self.server_port}/{session}/v1"

    def answers(self, url):
        return self.said[url.split("/")[-2]]


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.path.split("/")[1]
        commands, said = self.server.commands[session], self.server.said[session]
        n_answers = sum(message["role"] == "assistant" for message in body["messages"])
        if n_answers:
            said.append(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": "done"}
        if n_answers < len(commands):
            if "tools" in body:
                arguments = json.dumps({"command": commands[n_answers]})
                function = {"name": "bash", "arguments": arguments}
                message["tool_calls"] = [{"id": f"call-{n_answers}", "type": "function", "function": function}]
            else:
                message["content"] = commands[n_answers]
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        answer["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def policy():
    with Policy() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def driver(harbor_package):
    """Harbor's interpreter with the worker (see `drive.py`)."""
    python, environ = harbor_package
    words = [python, Path(__file__).with_name("drive.py"), WORKER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def play(driver, tmp_path):
    """`play(path, calls, **settings)`: what Harbor's worker says of calls."""
    folder = tmp_path / "temporary"
    folder.mkdir()

    def play(path, calls=(), **settings):
        job = {
            "settings": {"target": str(path), "place": "local", "offline": False, "reward": "reward", **settings},
            "folder": str(folder),
        }
        job["calls"] = [{"settings": {}, "url": "http://127.0.0.1:9/v1", **call} for call in calls]
        driver.stdin.write(json.dumps(job).encode() + b"\n")
        driver.stdin.flush()
        answer = json.loads(driver.stdout.readline())
        assert "crash" not in answer, answer["crash"]
        answer["results"] = [{"reward": None, "failure": None, **result} for result in answer.get("results", ())]
        return answer

    return play
