"""A policy learns from pictures: its held-out score rises, and that of a control whose pictures are another task's does
not."""

import json
import textwrap
import time
from pathlib import Path

import pytest

SHUFFLED = textwrap.dedent('''
    """Each picture of a training task is that of another one: the answer cannot be known."""
    import random
    from envgym.envs.pictures import Pictures, PicturesEnv, draw_scene, draw_walk, scene_of, walk_of
    from envgym.tasks import SeededTasks

    class ShuffledEnv(PicturesEnv):
        async def reset(self, *, seed=None, options=None):
            observation, info = await super().reset(seed=seed, options=options)
            self._is_held_out, self._lots = seed >= SeededTasks.TEST_START, random.Random(f"another {seed}")
            return self._shuffled(observation), info

        async def step(self, action):
            observation, *outcome = await super().step(action)
            return self._shuffled(observation or []), *outcome

        def _shuffled(self, observation):
            return observation if self._is_held_out else [self._with_another_picture(each) for each in observation]

        def _with_another_picture(self, message):
            if self.config.kind == "walk":
                picture = draw_walk(walk_of(self._lots, self.config.board), self.config)
            else:
                picture = draw_scene(scene_of(self._lots, [self._scene.ask]), self.config)
            return type(message)("user", [picture, *(part.text for part in message.content if part.text)])

    class Shuffled(Pictures):
        env_class = ShuffledEnv
''')
SEEDS = (0, 1, 2)


def score_of(folder, name):
    return json.loads((folder / "evals" / name / "result.json").read_text())["score"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_policy_learns_from_pictures_and_its_control_does_not(envgym, summary, store, tmp_path):
    """The control trains in the same way; both are evaluated on held-out pictures that show what is asked."""
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    start = time.monotonic()
    envgym("model", "vision_starter")  # from the cache, if it was made before
    figures = {"seconds_of_model": time.monotonic() - start}
    for seed in SEEDS:
        for name, env in (("pictures", "pictures"), ("control", "shuffled.py:Shuffled")):
            run, start = f"{name}_{seed}", time.monotonic()
            envgym("train", "--env", env, "--model", "vision_starter", "--name", run, f"seed={seed}", "eval.every=0")
            seconds = time.monotonic() - start
            envgym("eval", "--env", "pictures", "--model", f"runs/{run}", "eval.tasks=512", "--name", run)
            figures[run] = {"seconds": round(seconds, 1), "score": score_of(tmp_path, run)}
    envgym("eval", "--env", "pictures", "--model", "vision_starter", "eval.tasks=512", "--name", "before")
    figures["before"] = {"score": score_of(tmp_path, "before")}
    store("pictures_learning", **figures)
    for seed in SEEDS:
        assert figures[f"pictures_{seed}"]["score"] - figures[f"control_{seed}"]["score"] >= 0.3
        assert figures[f"pictures_{seed}"]["seconds"] < 300


WALK = ("env.kind=walk", "env.board=3", "env.max_turns=4")


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_a_policy_learns_a_walk_from_its_pictures_and_its_control_does_not(envgym, summary, store, tmp_path):
    """As above, over several turns with a picture in each. A run evaluates before and after on right pictures, the
    control's too."""
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    model = Path(envgym("model", "vision_starter_walk").stdout.split()[-1])  # from the cache, if it was made before
    steps = map(json.loads, (model / "warm_up_metrics.jsonl").read_text().splitlines())
    figures = {"settings": [*WALK], "seconds_of_warm_up": round(sum(step["seconds/step"] for step in steps), 1)}
    for seed in SEEDS:
        for name, env in (("walk", "pictures"), ("control", "shuffled.py:Shuffled")):
            run, start = f"{name}_{seed}", time.monotonic()
            options = ["--model", "vision_starter_walk", "--name", run, f"seed={seed}"]
            envgym("train", "--env", env, *WALK, *options, "eval.every=1000", "eval.tasks=256", "eval.greedy=false")
            scores = {key: result["score"] for key, result in summary(run)["eval"].items()}
            figures[run] = {"seconds": round(time.monotonic() - start, 1), **scores}
    store("pictures_walk", **figures)
    for seed in SEEDS:
        run, control = figures[f"walk_{seed}"], figures[f"control_{seed}"]
        assert run["after"] - max(run["before"], control["after"]) >= 0.15
