"""A policy learns from pictures: its held-out score rises, and that of a control whose pictures are another task's does
not."""

import json
import textwrap
import time

import pytest

SHUFFLED = textwrap.dedent('''
    """Each task shows the picture of another one: the answer cannot be known."""
    import random
    from envgym.envs.pictures import Pictures, PicturesEnv, draw_scene, scene_of

    class ShuffledEnv(PicturesEnv):
        async def reset(self, *, seed=None, options=None):
            observation, info = await super().reset(seed=seed, options=options)
            scene = scene_of(random.Random(f"another {seed}"), [self._scene.ask])
            [message] = observation
            [question] = [part for part in message.content if part.text]
            return [type(message)("user", [draw_scene(scene, self.config), question.text])], info

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
