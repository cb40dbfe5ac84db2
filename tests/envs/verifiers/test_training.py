"""Training on environments of verifiers; upstream's own are read from the checkout that `ENVGYM_VERIFIERS_ENVIRONMENTS`
names, the folder `environments` of verifiers' repository."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.conftest import store as store  # a fixture

from .test_verifiers import call, question

from tests.agents.test_external import Scripted  # isort: skip

CHECKOUT = os.environ.get("ENVGYM_VERIFIERS_ENVIRONMENTS")
ENVGYM = Path(sys.executable).with_name("envgym")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "verifiers.md"
SHORT = (
    "engine.kind=transformers", "steps=3", "rollout.tasks_per_step=2", "rollout.group_size=4", "rollout.max_tokens=24",
    "rollout.concurrency=4", "eval.every=0", "checkpoint.every=0", "env.test_fraction=0", "--name", "short",
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def train(folder, python, name):
    """Three steps of the page's command: the run's summary."""
    [command] = re.findall(r"^```console\nenvgym (train .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    known = {"verifiers:glossary": f"verifiers:{name}", "path/or/hub-id": "starter"}
    known["env.python=vf/bin/python"] = f"env.python={python}"
    words = [ENVGYM, *(known.get(word, word) for word in shlex.split(command)), *SHORT]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return json.loads((folder / "runs" / "short" / "summary.json").read_text())


def check(summary):
    assert (summary["status"], summary["steps"], summary["failures"]) == ("completed", 3, {})
    assert summary["tokens"]["trained"] > 0
    assert summary["mismatch"]["max_abs_logprob"] < 1e-3  # of the trained tokens to the engine's


def test_a_policy_is_trained_on_a_task_with_a_tool(verifiers_package, tmp_path):
    check(train(tmp_path, verifiers_package[0], "abacus"))


@pytest.mark.skipif(not CHECKOUT, reason="ENVGYM_VERIFIERS_ENVIRONMENTS names no checkout of verifiers' environments")
def test_upstreams_glossary(
    verifiers_package, roll_out, renderer, recording, check_episode, tmp_path, monkeypatch, request
):
    path = [f"{CHECKOUT}/glossary", *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def look_up(number, prompt):
        results = prompt.partition("<|im_start|>tool\n")[2]
        if results:
            return f"<answer>{results.partition('<|im_end|>')[0]}</answer>"
        return call("facts_lookup", name=question(prompt).split('"')[1])

    engine = recording(Scripted(renderer, look_up))
    episodes = roll_out("glossary", engine, range(5), context=2048)
    for episode in episodes:
        check_episode(episode, engine.answers)
        assert (episode.reward, [len(row.turns) for row in episode.rows]) == (1.0, [2])
    [wrong] = roll_out("glossary", Scripted(renderer, lambda number, prompt: "no idea"))
    assert wrong.reward == 0.0
    summary = train(tmp_path, verifiers_package[0], "glossary")
    check(summary)
    request.getfixturevalue("store")(
        "verifiers_glossary",
        episodes=len(episodes),
        rewards=[episode.reward for episode in episodes],
        ids_equal=True,
        training_steps=summary["steps"],
        trained_tokens=summary["tokens"]["trained"],
        max_abs_logprob=summary["mismatch"]["max_abs_logprob"],
        seconds=summary["seconds"],
    )
