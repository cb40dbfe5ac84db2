"""An environment that crashes on wrong answers: learned with a reward for failures, noticed without."""

import json
from pathlib import Path

import pytest

ENVIRONMENTS = Path(__file__).with_name("failing_sums.py")
ALARMS = {"failures_by_length", "failures_by_surprise", "failures_by_reward", "failures_by_turns"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def train(envgym, summary):
    def run(spec, name, *words):
        settings = ("eval.every=0", "rollout.max_failed_share=1", "steps=40")
        envgym("train", "--env", f"{ENVIRONMENTS}:{spec}", "--name", name, *settings, *words, timeout=1800)
        return summary(name)

    return run


def test_a_crash_on_wrong_answers_is_learned_from_with_a_reward_and_noticed_without(train, envgym, tmp_path, store):
    runs = {
        "sound": train("SoundSpec", "sound"),
        "crashes": train("CrashesSpec", "crashes"),
        "crashes_rewarded": train("CrashesSpec", "crashes_rewarded", "rollout.failed_reward=0"),
    }
    results = {}
    for name, result in {"before": {}, **runs}.items():
        model = "starter" if name == "before" else f"runs/{name}"
        words = (
            "--env",
            f"{ENVIRONMENTS}:SoundSpec",
            "--model",
            model,
            "--name",
            name,
            "eval.tasks=512",
            "eval.greedy=false",
        )
        envgym("eval", *words, timeout=600)
        [env] = json.loads((tmp_path / "evals" / name / "result.json").read_text())["envs"].values()
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines() if name != "before" else []
        steps = [json.loads(line) for line in lines if '"reward/mean"' in line]
        results[name] = {
            "score": env["score"],
            "ci95": env["ci95"],
            "first_reward": steps[0]["reward/mean"] if steps else None,
            "last_reward": steps[-1]["reward/mean"] if steps else None,
            "failed_share": sum(step["failures/share"] for step in steps) / max(1, len(steps)),
            "alarms": sorted(ALARMS & result.get("alarms", {}).keys()),
        }
    store("failed_reward", runs=results)
    assert results["crashes"]["alarms"]
    assert not results["sound"]["alarms"]
    assert results["sound"]["score"] > 0.9
    assert results["crashes_rewarded"]["score"] >= results["sound"]["ci95"][0]
    assert results["crashes"]["score"] < results["before"]["score"] + 0.1


def test_failures_by_chance_raise_no_alarm(train, store):
    small = ("steps=12", "rollout.tasks_per_step=32", "rollout.seed_scope=episode")
    alarms = {}
    for seed in range(10):
        result = train("FlakySpec", f"flaky-{seed}", *small, f"seed={seed}")
        assert result["failures"]["environment"] > 100
        alarms[seed] = sorted(ALARMS & result["alarms"].keys())
    store("failed_reward_clean", alarms=alarms)
    assert not any(alarms.values())
