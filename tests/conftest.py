"""What many tests share: a small Qwen3 policy with random weights, and a byte-level tokenizer that merges."""

import contextlib
import fcntl
import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import settings

# Threads that wait must sleep: spinning, on a machine that is busy, made a worker test of ten seconds one of minutes.
# Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Hundreds of programs are started: each would compile all of envgym where no compiled files may be written.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "ONEDNN_MAX_CPU_ISA" not in os.environ and " amx_bf16 " in Path("/proc/cpuinfo").read_text():
    # Some virtual machines show their programs a matrix unit that they then may not use: torch dies in bfloat16.
    product = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    if subprocess.run([sys.executable, "-c", product], capture_output=True).returncode < 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"

# A shell starts what runs in the background with Ctrl-C ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("envgym", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("envgym")


@pytest.fixture(scope="module", autouse=True)
def nothing_of_other_files_is_looked_through() -> None:
    """What was imported and collected stays to the end: no full garbage collection need go through all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ctrl_c_is_handled_as_before():
    """A test that leaves another handler of Ctrl-C would fail a later one that presses it."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == handler


TEXT = """what is twelve plus thirty-four? the answer is forty-six. what is 12 + 34? the answer is 46.
A merging tokenizer writes the same text in more than one way, which a character tokenizer cannot."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model folder: Qwen3, 2 layers, tied embeddings, float32, 384 tokens with byte-pair merges.

    `<|im_end|>` (id 0) ends a turn; ids up to 511 are in the embedding, so a sampled id may have no text.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,  # far enough from uniform that a wrong log-probability shows
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=2,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved folder with a reward model of `tiny_model`'s architecture and tokenizer: one number a conversation."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("tiny_reward_model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny_model)
    config.num_labels, config.mean, config.std = 1, 0.5, 2.0
    Qwen3ForSequenceClassification(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory):
    """vision_model(kind, seed=0) -> the folder of a vision-language model of `tests.vision_models`."""
    from functools import cache

    from tests.vision_models import make_vision_model

    @cache
    def make(kind: str, seed: int = 0) -> Path:
        return make_vision_model(kind, tmp_path_factory.mktemp(kind), [TEXT], seed=seed)

    return make


@pytest.fixture(scope="session")
def serving():
    """`async with serving(handler) as url`: a real HTTP server on which `handler` answers every request, whatever its
    path."""
    from aiohttp import web

    @contextlib.asynccontextmanager
    async def serving(handler):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = site._server.sockets[0].getsockname()[:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    return serving


@pytest.fixture(scope="session")
def through_a_checkpoint():
    """`through_a_checkpoint(state)`: a part of the controller's state as a resumed run finds it."""
    from envgym.run_folder import state_from_json, state_to_json

    return lambda state: state_from_json(state_to_json({"progress": {"step": 0}, "part": state}))["part"]


@pytest.fixture(scope="session")
def documented_metrics():
    """The names in the tables of `docs/reference/metrics.md` as patterns, and whether every run logs each: those that
    come only with a setting say so in italics."""
    import re

    page = (Path(__file__).parents[1] / "docs" / "reference" / "metrics.md").read_text()
    names = {}
    for cell, says in re.findall(r"^\| (`.+?) \| (.*?) \|", page, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            pattern = re.sub(r"[A-Z]+", "[^/]+", re.escape(name).replace("…", ".+"))
            names[re.compile(pattern)] = not says.startswith("_")
    return names


MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""What mistral_common's version 3 says of a conversation, as text for its SentencePiece vocabulary."""


@pytest.fixture(scope="session")
def tekken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real byte-level byte-pair tokenizer (131 thousand tokens) and its own chat template."""
    import mistral_common
    from transformers.integrations.mistral import convert_tekken_tokenizer

    folder = tmp_path_factory.mktemp("tekken")
    data = Path(mistral_common.__file__).parent / "data"
    convert_tekken_tokenizer(str(data / "tekken_240911.json")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real SentencePiece byte-pair tokenizer (33 thousand tokens), which writes spaces as tokens' own
    beginnings, and a chat template."""
    import shutil

    import mistral_common
    from transformers import LlamaTokenizer

    folder = tmp_path_factory.mktemp("sentencepiece")
    data = Path(mistral_common.__file__).parent / "data"
    shutil.copy(data / "mistral_instruct_tokenizer_240323.model.v3", folder / "tokenizer.model")
    tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True)  # as the models' own do by default
    tokenizer.chat_template = MISTRAL_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.model").unlink()
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in this process, in an empty folder, with `typed` on standard input."""
    from envgym.cli import main

    monkeypatch.chdir(tmp_path)

    def run_command(*words, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        try:
            status = main(list(map(str, words)))
        except SystemExit as end:  # argparse, after its help
            status = end.code
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return run_command


@pytest.fixture(scope="session")
def benchmark_data() -> Path:
    """The folder of real benchmark data, of which the repository holds none."""
    folder = os.environ.get("ENVGYM_BENCHMARK_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("ENVGYM_BENCHMARK_DATA names no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def recording():
    """`recording(engine)`: an engine that remembers each request's tokens and its answer in `answers`."""
    return _Recording


@pytest.fixture(scope="session")
def check_episode():
    """`check_episode(episode, answers)`: the invariants of an episode, against what the engine saw and said."""
    return _check_episode


class _Recording:
    """An engine that remembers what it was asked and what it answered, by request."""

    def __init__(self, engine):
        self.engine = engine
        self.answers = {}

    async def generate(self, request):
        generation = await self.engine.generate(request)
        self.answers[request.id] = (tuple(request.token_ids), generation)
        return generation


def _check_episode(episode, answers):
    """What the engine was given at turn k is exactly the segments before turn k of its row, what it returned is
    recorded as it came, and nothing else carries weight."""
    from envgym.types import StopReason, float_array

    turn = 0
    for row in episode.rows:
        before = []
        assert row.segments[0].role == "prompt"
        assert [s.role for s in row.segments].count("prompt") == 1
        assert len(row.turns) == sum(segment.role == "action" for segment in row.segments)
        for segment in row.segments:
            if segment.role == "action":
                asked, said = answers[f"{episode.id}.{turn:04d}"]
                assert tuple(before) == asked
                assert tuple(segment.token_ids) == tuple(said.token_ids)
                assert segment.logprobs == float_array(said.logprobs)
                assert segment.versions == said.versions
                assert list(segment.loss_weights) == [1.0] * len(said.token_ids)
                turn += 1
            else:
                assert segment.logprobs is None
                assert set(segment.loss_weights) <= {0.0}
            before += segment.token_ids
        assert row.token_ids.tolist() == before
        assert row.loss_weights.tolist() == [w for segment in row.segments for w in segment.loss_weights]
    assert turn == len([key for key in answers if key.startswith(f"{episode.id}.")])
    stops = [row.turns[-1].stop_reason for row in episode.rows if row.turns]
    if stops and stops[-1] is StopReason.LENGTH:
        assert episode.outcome.reason in ("length", "context", "tokens", "environment", "template")


# -- the real packages of other frameworks ----------------------------------------------------------------

PACKAGES = {
    "nemo_gym_package": "NeMo-Gym",
    "openenv_package": "OpenEnv",
    "litellm_package": "LiteLLM",
    "harbor_package": "Harbor",
    "verifiers_package": "verifiers",
}
"""The fixtures that install a framework, and its name."""


@pytest.fixture(scope="session")
def nemo_gym_package() -> tuple[Path, dict[str, str]]:
    """The real NeMo-Gym: its Python, and the variables to run it with. Skips where there is no Python 3.12."""
    python = _python_3_12()
    if python is None:
        pytest.skip("NeMo-Gym needs Python 3.12, and there is none here")
    installed, variables = install("envs/nemo_gym", "nemo-gym-0.4.0", python)
    return installed, {**variables, "PYTHONPATH": str(Path(__file__).parent / "envs" / "nemo_gym" / "stubs")}


@pytest.fixture(scope="session")
def openenv_package() -> tuple[Path, dict[str, str]]:
    """The real OpenEnv: its Python, and the variables to run it with."""
    return install("envs/openenv", "openenv-0.10.0", sys.executable)


@pytest.fixture(scope="session")
def harbor_package() -> tuple[Path, dict[str, str]]:
    """The real Harbor: its Python, and the variables to run it with. Skips where there is no Python 3.12."""
    python = _python_3_12()
    if python is None:
        pytest.skip("Harbor needs Python 3.12, and there is none here")
    return install("envs/harbor", "harbor-0.25.0", python)


@pytest.fixture(scope="session")
def verifiers_package() -> tuple[Path, dict[str, str]]:
    """The real verifiers: its Python, and the variables to run it with."""
    return install("envs/verifiers", "verifiers-0.4.0", sys.executable)


@pytest.fixture(scope="session")
def litellm_package() -> tuple[Path, dict[str, str]]:
    """The real LiteLLM: its Python, and the variables to run it with."""
    return install("agents", "litellm-1.110.2", sys.executable)


def install(tests: str, name: str, python: str) -> tuple[Path, dict[str, str]]:
    """A framework in an environment of its own, by the lock `requirements.txt` in its folder of tests.

    Made once, in about a minute; later versions of the lock make it anew.
    """
    requirements = Path(__file__).parent / tests / "requirements.txt"
    folder = Path.home() / ".cache" / "envgym" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as waiting:
        fcntl.flock(waiting, fcntl.LOCK_EX)  # another run of the tests may be making it
        made = folder / "requirements.txt"
        if not made.exists() or made.read_text() != requirements.read_text():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            for command in (
                [python, "-m", "venv", folder],
                [*pip, "--no-deps", "--no-compile", "-r", requirements],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
                assert done.returncode == 0, f"{name} cannot be installed: {done.stderr[-2000:]}"
            shutil.copy(requirements, made)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return folder / "bin" / "python", {**variables, "OMP_NUM_THREADS": "1"}


def _python_3_12() -> str | None:
    """A Python 3.12 on the path, or of pyenv's."""
    found = [shutil.which("python3.12")]
    if (pyenv := shutil.which("pyenv")) is not None:
        run = subprocess.run([pyenv, "versions", "--bare"], capture_output=True, text=True, timeout=60, check=False)
        for version in [line.strip() for line in run.stdout.splitlines() if line.strip().startswith("3.12")]:
            run = subprocess.run([pyenv, "prefix", version], capture_output=True, text=True, timeout=60, check=False)
            found.append(f"{run.stdout.strip()}/bin/python3.12")
    for python in filter(None, found):
        program = [python, "-c", "import sys, venv; print(sys.version_info[:2])"]  # a shim may lead nowhere
        with contextlib.suppress(OSError):
            run = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
            if run.stdout.strip() == "(3, 12)":
                return python
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    for fixture in PACKAGES.keys() & set(getattr(item, "fixturenames", ())):
        item.user_properties.append(("with", PACKAGES[fixture]))  # which reports carry, also from another process


def pytest_internalerror(excrepr: object, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Print it in the process where it happens: xdist reports only that the process has ended."""
    print("".join(traceback.format_exception(excinfo.value)[-6:]), file=sys.__stderr__, flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say whether the tests with the real packages ran: a green run without them shows less."""
    for package in PACKAGES.values():
        counts = {}
        for outcome in ("passed", "failed", "error", "skipped", "deselected"):
            reports = terminalreporter.stats.get(outcome, ())
            counts[outcome] = len({each.nodeid for each in reports if ("with", package) in _properties(each)})
        if any(counts.values()):
            said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
            terminalreporter.write_line(f"With the real {package}, {sum(counts.values())} tests: {said}")


def _properties(report: object) -> list[tuple[str, object]]:
    return [tuple(each) for each in getattr(report, "user_properties", ())]
