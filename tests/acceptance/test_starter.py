"""The starter learns environments that it was not trained on, and controls at learning rate 0 do not; and a starter
that is made anew is like the one that ships."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from statistics import fmean

import pytest

from tests.page_files import write_named_blocks

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def write_word_problems(folder: Path) -> None:
    rng = random.Random(0)
    lines = set()
    while len(lines) < 1500:
        name, thing = rng.choice(("Tom", "Ada", "Lin")), rng.choice(("apples", "books", "coins"))
        have, get = rng.randint(11, 60), rng.randint(11, 39)
        question = f"{name} has {have} {thing} and gets {get} more. How many now?"
        lines.add(json.dumps({"question": question, "answer": str(have + get)}))
    (folder / "problems.jsonl").write_text("\n".join(sorted(lines)) + "\n")


FROM_DEMONSTRATIONS = ("--recipe", "sft_grpo")
FEW = ("stages.grpo.steps=15", "stages.grpo.rollout.tasks_per_step=16")
CASES = {
    "class": ("--env", "reverse.py"),
    "reward_function": ("--env", "three_words.py"),
    "own_problems": ("--env", "math_verify", "data.path=problems.jsonl", *FROM_DEMONSTRATIONS),
    "template_reward": ("--env", "new_reward.py"),
    "template_multi_turn": ("--env", "new_multi_turn.py", *FROM_DEMONSTRATIONS),
    "guess": ("--env", "examples/guess.py:Guess", *FROM_DEMONSTRATIONS),
    "one_call": ("--env", "tool_use", "steps=20"),
    "template_tools": ("--env", "new_tools.py", *FROM_DEMONSTRATIONS, *FEW),
    "hidden_number": ("--env", "hidden_number.py", *FROM_DEMONSTRATIONS, *FEW, "stages.grpo.learner.lr=1e-4"),
}
"""Name -> the words of `envgym train`, in a folder with the files that documentation, templates and examples have."""


@pytest.fixture
def environments(envgym, tmp_path):
    for page in ("README.md", "docs/environments/tools.md"):
        write_named_blocks((ROOT / page).read_text(), "python", tmp_path)
    write_word_problems(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for kind in ("reward", "multi-turn", "tools"):
        envgym("envs", "new", f"new_{kind.replace('-', '_')}", "--kind", kind)


@pytest.mark.usefixtures("environments")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_an_environment_is_learned_from_the_starter(case, seed, envgym, summary, store, tmp_path):
    began = time.monotonic()
    envgym("train", *CASES[case], "--name", "run", f"seed={seed}", timeout=1800)
    seconds = time.monotonic() - began  # of all stages; those of a summary are the last one's
    result = summary("run")
    before, after = result["eval"]["before"], result["eval"]["after"]
    scores = {"before": before, "after": after}
    if FROM_DEMONSTRATIONS[0] in CASES[case]:
        scores["demonstrations"] = before  # learned by the first stage
        data = [word for word in CASES[case] if word.startswith("data.")]
        envgym("eval", *CASES[case][:2], *data, "--model", "starter", "--name", "starter", "eval.greedy=false")
        [before] = json.loads((tmp_path / "evals" / "starter" / "result.json").read_text())["envs"].values()
        scores["before"] = before
    store(f"starter_{case}_{seed}", **scores, steps=result["steps"], seconds=seconds)
    assert after["score"] >= before["score"] + 0.3 or before["score"] < 0.65 <= 0.95 <= after["score"]
    if case == "class":
        assert before["score"] <= 0.65
        assert after["score"] >= 0.95


@pytest.mark.usefixtures("environments")
@pytest.mark.parametrize("case", [case for case, words in CASES.items() if FROM_DEMONSTRATIONS[0] not in words])
def test_a_control_that_cannot_learn_does_not(case, envgym, summary, store):
    envgym("train", *CASES[case], "--name", "control", "learner.lr=0", "steps=10", "deterministic=true", timeout=1800)
    result = summary("control")
    before, after = result["eval"]["before"], result["eval"]["after"]
    store(f"starter_{case}_control", before=before, after=after)
    low, high = before["ci95"]
    assert low <= after["score"] <= high


@pytest.mark.usefixtures("environments")
def test_a_starter_made_anew_is_like_the_one_that_ships(envgym, tmp_path, monkeypatch, store):
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / "cache"))
    began = time.monotonic()
    made = envgym("model", "examples/starter/starter.yaml", timeout=3600).stdout.splitlines()[-1]
    seconds = time.monotonic() - began

    def accuracies(model: str) -> dict[str, float]:
        envgym(
            "eval", "--env", "examples.starter:Exercises", "--model", model, "--name", Path(model).name,
            "eval.tasks=20000", "rollout.temperature=0", timeout=1800,
        )  # fmt: skip
        [result] = json.loads((tmp_path / "evals" / Path(model).name / "result.json").read_text())["envs"].values()
        return {name: value for name, value in result["metrics"].items() if name.startswith("accuracy/")}

    shipped, anew = accuracies("starter"), accuracies(made)
    store("starter", seconds=seconds, shipped=shipped, anew=anew)
    assert shipped.keys() == anew.keys()
    # Exercises that are half learned come out better or worse on another machine; their mean does not.
    assert {name: (shipped[name], anew[name]) for name in anew if abs(shipped[name] - anew[name]) > 0.25} == {}
    assert abs(fmean(shipped.values()) - fmean(anew.values())) <= 0.03
    envgym("eval", "--env", "math_verify", "--model", made, "--name", "main_job")
    main_job = json.loads((tmp_path / "evals" / "main_job" / "result.json").read_text())["envs"]["math_verify"]
    stored = json.loads((ROOT / "tests" / "results" / "main_job_seed_0.json").read_text())
    low, high = stored["figures"]["before"]["ci95"]
    assert low <= main_job["score"] <= high
