"""What other packages add, each in one file and a line of entry points: an engine, a policy loss, an advantage and a
dialect. Each is a package of its own, and one training step uses all of them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from envgym.config.resolve import resolve
from envgym.engines import make_engine
from envgym.engines.spec import EngineSpec
from envgym.errors import NameNotFound

ENVGYM = str(Path(sys.executable).with_name("envgym"))

ENGINE = '''
from pathlib import Path

from tokenizers import Tokenizer

from envgym.engine import EngineInfo, Generation
from envgym.types import StopReason, VersionSpan, float_array, int_array


class Scripted:
    """Answers 1 and 0 in turn, each with its engine argument `logprob` as the log-probability of every token."""

    def __init__(self, their_spec):
        self.tokenizer = Tokenizer.from_file(str(Path(their_spec.model, "tokenizer.json")))
        self.logprob = their_spec.engine_args["logprob"]
        self.version = self.count = self.received = 0

    async def info(self):
        return EngineInfo("scripted 1", 256)

    async def steps(self):
        return self.count

    async def generate(self, request):
        self.count += 1
        ids = [*self.tokenizer.encode(str(self.count % 2)).ids, request.sampling.stop_token_ids[0]]
        versions = (VersionSpan(self.version, 0, len(ids)),)
        return Generation(int_array(ids), float_array([self.logprob] * len(ids)), StopReason.STOP, versions)

    async def score(self, token_ids):
        return [self.logprob] * (len(token_ids) - 1)

    async def can_read(self, path):
        return Path(path).exists()

    async def begin_weights(self):
        self.received = 0

    async def load_bucket(self, bucket):
        self.received += bucket.checksum

    async def end_weights(self, n_buckets, version):
        self.version = version
        return self.received

    async def close(self):
        pass
'''
POLICY_LOSS = '''
from envgym.learners.losses import PolicyLoss


class LogRatio(PolicyLoss):
    """-A (log pi - log pi_old), and every token counts as clipped from above."""

    def losses(self, log_ratio, logprobs, advantages, config):
        everywhere = log_ratio == log_ratio
        return -advantages * log_ratio, ~everywhere, everywhere
'''
ADVANTAGE = '''
from envgym.learners.policy_gradient import CriticFreeLearner


class SevenTimes(CriticFreeLearner):
    """Seven times the difference to the lowest reward."""

    min_group_size = 2

    def advantages(self, rewards):
        return [7 * (reward - min(rewards)) for reward in rewards]
'''
DIALECT = """
from envgym.remote.server import serve as serve_over_http


def add_options(parser):
    parser.add_argument("--at", required=True, help="port")
    parser.add_argument("--greeting", default="ready", help="line to print")


async def serve(specs, options):
    assert vars(options).keys() == {"at", "greeting"}, options
    ready = lambda url: print(options.greeting, url, flush=True)
    await serve_over_http(specs, "127.0.0.1", int(options.at), on_ready=ready)
"""
ENVIRONMENT = '''
import envgym


class Ones(envgym.Env):
    """Say 1."""

    async def reset(self, *, seed=None, options=None):
        return "Say 1.", {}

    async def step(self, action):
        return None, float(action.text == "1"), True, False, {}
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with an environment's file, and the variables of a process that has four packages installed."""
    folder = tmp_path_factory.mktemp("open")
    packages = {
        "scripted": (ENGINE, "envgym.engines", "Scripted"),
        "logratio": (POLICY_LOSS, "envgym.policy_losses", "LogRatio"),
        "seven": (ADVANTAGE, "envgym.learners", "SevenTimes"),
        "greeting": (DIALECT, "envgym.dialects", ""),
    }
    for name, (source, group, attribute) in packages.items():
        site = folder / name
        info = site / f"their_{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"their_{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-{name}\nVersion: 1.0\n")
        target = f"their_{name}:{attribute}".rstrip(":")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    (folder / "ones.py").write_text(ENVIRONMENT)
    paths = [*(str(folder / name) for name in packages), os.environ.get("PYTHONPATH", "")]
    return folder, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def serving(folder, environ):
    """The URL of the environment, served by the package's dialect."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["ones=ones.py", "--dialect", "greeting", "--at", str(port), "--greeting", "good morning"]
    server = subprocess.Popen([ENVGYM, "serve", *words], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == f"good morning http://127.0.0.1:{port}\n"
        yield f"http://127.0.0.1:{port}/ones"
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


def run(installed, *words):
    folder, environ = installed
    return subprocess.run(
        [ENVGYM, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_step_is_trained_with_a_package_for_each(installed):
    with serving(*installed) as url:
        done = run(
            installed, "train", "--env", url, "--learner", "seven", "--name", "theirs", "steps=1",
            "learner.policy_loss=logratio", "engine=scripted", "engine.args.logprob=-2.5", "sync.tolerance=1000",
            "rollout.tasks_per_step=2", "rollout.group_size=2", "eval.every=0",
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run_folder = installed[0] / "runs" / "theirs"
    [*_, metrics] = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics["reward/mean"] == 0.5
    assert metrics["advantage/max_abs"] == 7.0
    assert metrics["policy/clip_fraction_high"] == 1.0
    assert (run_folder / "model" / "model.safetensors").exists()


def test_names_that_are_not_there_are_refused_with_those_that_are(installed):
    for words, line in {
        "engine=mine": "there is no engine 'mine'. There is auto, openai, scripted, transformers, vllm.",
        "learner.policy_loss=logratios": "there is no policy loss 'logratios'. Did you mean 'logratio'?",
        "--learner=sevens": "there is no learner 'sevens'. Did you mean 'seven'?",
    }.items():
        done = run(installed, "train", "--env", "ones.py", words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"envgym: error: {line}\n"


def test_a_dialect_gets_its_options_alone(installed):
    words = ["serve", "ones.py", "--dialect", "greeting"]
    assert "--greeting GREETING" in run(installed, *words, "--help").stdout
    done = run(installed, *words, "--at", "1", "--register", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("envgym: error: envgym serve has no option '--register'.")


def test_files_need_no_package(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(POLICY_LOSS)
    monkeypatch.chdir(tmp_path)
    settings = {"env": "math_verify", "learner.policy_loss": "mine.py:LogRatio", "engine": "mine.py:Engine"}
    stage = resolve(settings).stages[0]
    assert (stage.learner.settings["policy_loss"], stage.engine.kind) == ("mine.py:LogRatio", "mine.py:Engine")
    with pytest.raises(NameNotFound, match=r"mine.py defines no 'LogRation'. Did you mean 'LogRatio'\?"):
        resolve(settings | {"learner.policy_loss": "mine.py:LogRation"})


def test_a_module_that_is_not_there_is_told_with_its_entry_point(tmp_path, monkeypatch):
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[envgym.engines]\nscripted = absent_package.engines:Scripted\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = "no Python module 'absent_package', which theirs names as its envgym.engines 'scripted'"
    with pytest.raises(NameNotFound, match=line):
        make_engine("absent_package.engines:Scripted", EngineSpec("model"))
