"""Runs whose groups branch: repeated, resumed, replayed and shown."""

import pytest

from envgym.cli import main
from envgym.episodes.files import read_episodes
from envgym.run_folder import RunFolder

GAME = """
import envgym


class Game(envgym.Env):
    \"\"\"Three turns, each answered with a drawn number; the last one's is the reward.\"\"\"

    async def reset(self, *, seed=None, options=None):
        self.turns = 0
        return [{"role": "user", "content": f"Say {self.rng.randrange(10)}"}], {}

    async def step(self, action):
        self.turns += 1
        number = self.rng.randrange(10)
        reward = float(str(number) in action.text) if self.turns == 3 else None
        return [{"role": "user", "content": str(number)}], reward, self.turns == 3, False, {}
"""
SETTINGS = (
    "--env", "game.py:Game", "rollout.tasks_per_step=3", "rollout.group_size=2", "rollout.branches=3",
    "learner.advantage=tree", "rollout.max_tokens=6", "eval.every=0", "engine.kind=transformers", "debug=true",
    "deterministic=true", "checkpoint.every=1",
)  # fmt: skip


def train(*words):
    assert main(["train", *words]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of two steps, and one that was resumed after its first."""
    folder = tmp_path_factory.mktemp("branches")
    (folder / "game.py").write_text(GAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(*SETTINGS, "--name", "whole", "steps=2")
        train(*SETTINGS, "--name", "resumed", "steps=1")
        train("--resume", "resumed", "steps=2")
    return folder


def episodes(folder, name, step):
    return read_episodes(RunFolder(folder / "runs" / name).rollout_file(step))


def test_a_resumed_run_is_the_whole_one_bit_for_bit(folder):
    weights = [(folder / "runs" / name / "model/model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert weights[0] == weights[1]
    for step in (1, 2):
        first, second = (episodes(folder, name, step) for name in ("whole", "resumed"))
        for one, another in zip(first, second, strict=True):
            one.seconds = another.seconds = 0.0
            assert one == another
        assert [bool(episode.parent) for episode in first] == [False, False, True, True, True] * 3


def test_a_shared_turn_is_trained_once_and_no_law_is_broken(folder):
    for record in RunFolder(folder / "runs" / "whole").read_metrics():
        if record["step"]:
            sampled = sum(episode.n_new_tokens for episode in episodes(folder, "whole", record["step"]))
            assert record["tokens/sampled"] == record["tokens/trained"] == sampled
            assert record["branches/episodes"] == 9
            assert (record["laws/untrained_share"], record["laws/lost_share"]) == (0, 0)
            assert "laws/sign" not in record
            assert "laws/denominator" not in record
            assert record["mismatch/max"] < 1e-3


def test_branches_are_replayed_and_shown(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["replay", "whole", "--step", "2"]) == 0
    assert "15 of 15 episodes" in capsys.readouterr().out
    assert main(["show", "whole", "--step", "1", "--count", "15"]) == 0
    out = capsys.readouterr().out
    branch = next(episode for episode in episodes(folder, "whole", 1) if episode.parent)
    assert f"episode {branch.id}, a branch of {branch.parent} after turn {branch.parent_turn}\n" in out
    n_shared = branch.n_action_tokens - branch.n_new_tokens
    assert f"{branch.n_action_tokens} tokens in 3 turns, {n_shared} of them its parent's" in out


def test_a_step_is_sampled_again(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["replay", "whole", "--step", "2", "--sample"]) == 0
    assert "15 of 15" in capsys.readouterr().out
