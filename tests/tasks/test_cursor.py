"""Which tasks come next: epochs, resuming, and a curriculum that passes over what is always or never solved."""

import asyncio
import json
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.config.resolve import resolve
from envgym.engine import SamplingParams
from envgym.env import SeededTasks, TaskList, TaskSet
from envgym.errors import ConfigError, RunError
from envgym.render import NoRenderer
from envgym.run_folder import RunFolder
from envgym.tasks import Interleaved
from envgym.tasks.curriculum import Curriculum, CurriculumConfig
from envgym.tasks.task_set import TaskCursor
from envgym.training.components import Components
from envgym.training.trainer import Trainer
from envgym.types import Episode, Group, Outcome, Task


def task_set(n):
    return TaskList([Task(str(index)) for index in range(n)])


def take(cursor, *counts):
    """The ids of the tasks that come next, in bites of `counts`."""
    return [task.id for count in counts for task in asyncio.run(cursor.next(count))]


@given(st.integers(1, 20), st.lists(st.integers(0, 15), min_size=1, max_size=8))
@settings(deadline=None)
def test_an_epoch_has_every_task_once_however_it_is_cut(n, counts):
    ids = take(TaskCursor(task_set(n), seed=0), *counts)
    assert ids == take(TaskCursor(task_set(n), seed=0), sum(counts))
    for start in range(0, len(ids), n):
        epoch = ids[start : start + n]
        assert len(set(epoch)) == len(epoch)
    assert set(ids[:n]) == {str(i) for i in range(n)} or len(ids) < n


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    first, second = take(TaskCursor(task_set(50), 0), 50), take(TaskCursor(task_set(50), 0), 50, 50)[50:]
    other = take(TaskCursor(task_set(50), 1), 50)
    assert len({tuple(order) for order in (first, second, other, sorted(first, key=int))}) == 4


def test_a_set_without_end_is_taken_in_order():
    assert take(TaskCursor(SeededTasks("train"), 0), 2, 1) == ["seed-0", "seed-1", "seed-2"]


def test_the_seed_of_the_run_decides_on_the_order_of_mixed_sets():
    def cursor(seed):
        return TaskCursor(Interleaved([task_set(30), SeededTasks("train")], [1, 1]), seed)

    assert take(cursor(1), 40) == take(cursor(1), 40) != take(cursor(2), 40)


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 20))
@settings(deadline=None)
def test_a_restored_cursor_goes_on_where_the_other_stood(n, before, after):
    cursor = TaskCursor(task_set(n), 3)
    take(cursor, before)
    restored = TaskCursor(task_set(n), 3)
    take(restored, 5)  # wherever it stood itself
    restored.load_state(json.loads(json.dumps(cursor.state())))
    assert take(restored, after) == take(cursor, after)


def test_an_environment_without_training_tasks_is_said_at_once():
    with pytest.raises(RunError, match="no training tasks"):
        TaskCursor(task_set(0), 0)


# -- the curriculum ---------------------------------------------------------------------------------------


def curriculum(skip, seed=0, memory=32):
    return Curriculum(CurriculumConfig(skip=skip, memory=memory), seed)


def group(task, *scores):
    """A group with an episode for each score; None is a failed one's."""
    episodes = [
        Episode("e", task, Outcome.fail("timeout", "slow"))
        if score is None
        else Episode("e", task, Outcome.finish(), reward=score, score=score)
        for score in scores
    ]
    return Group("g", task, episodes)


class Policy:
    """Solves each task with a probability of its own."""

    def __init__(self, chance, size=8, seed=0):
        self.chance, self.size, self.rng = chance, size, random.Random(seed)

    def play(self, tasks):
        return [
            group(task, *(float(self.rng.random() < self.chance(task)) for _ in range(self.size))) for task in tasks
        ]


def train(cursor, policy, steps, tasks=32):
    """The groups of each step."""

    async def loop():
        for _ in range(steps):
            groups = policy.play(await cursor.next(tasks))
            cursor.observe(groups)
            yield groups

    async def collect():
        return [groups async for groups in loop()]

    return asyncio.run(collect())


def useful_share(steps):
    groups = [group for groups in steps for group in groups]
    return sum(len({episode.score for episode in group.episodes}) > 1 for group in groups) / len(groups)


def mostly_settled(task):
    """Of ten tasks four are never solved, four always, and two sometimes."""
    return [0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0.5][int(task.id) % 10]


def test_more_groups_have_something_to_teach():
    shares = {}
    for skip in (0.0, 0.5, 0.9):
        cursor = TaskCursor(task_set(200), 0, curriculum(skip) if skip else None)
        shares[skip] = useful_share(train(cursor, Policy(mostly_settled), 100)[20:])
    assert shares[0.0] < 0.25
    assert shares[0.5] > 1.4 * shares[0.0]
    assert shares[0.9] > 2.5 * shares[0.0]


@given(
    n=st.integers(1, 30),
    skip=st.floats(0.05, 0.95),
    seed=st.integers(0, 3),
    chances=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7),
    difficulties=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_nothing_is_starved(n, skip, seed, chances, difficulties):
    """A task is played at least every 1 / (1 - skip) epochs, even where nothing is worth playing."""
    tasks = TaskList([Task(str(i), difficulty=i % 3 if difficulties else None) for i in range(n)])
    cursor = TaskCursor(tasks, seed, curriculum(skip, seed))
    policy = Policy(lambda task: chances[int(task.id) % len(chances)], seed=seed)
    last_played, wait = dict.fromkeys(map(str, range(n)), 0), math.ceil(1 / (1 - skip)) + 1
    for _ in range(40):
        for groups in train(cursor, policy, 1, tasks=1):
            epoch = (cursor.state()["position"] - 1) // n
            last_played[groups[0].task.id] = epoch
            assert min(last_played.values()) >= epoch - wait


def test_a_task_that_has_come_within_reach_is_found_and_kept():
    learned = set()
    cursor = TaskCursor(task_set(50), 0, curriculum(0.8))
    policy = Policy(lambda task: 0.5 if task.id in learned else 0.0)
    train(cursor, policy, 20, tasks=10)
    learned.add("7")
    played = Counter(group.task.id for groups in train(cursor, policy, 60, tasks=10) for group in groups)
    others = [played[str(n)] for n in range(50) if n != 7]
    assert min(others) > 0
    assert played["7"] > 2.5 * max(others)


def test_without_a_curriculum_and_before_any_group_the_order_is_the_usual_one():
    plain = take(TaskCursor(task_set(30), 4), 60)
    assert take(TaskCursor(task_set(30), 4, curriculum(0.9, 4)), 60) == plain


@pytest.mark.parametrize(
    ("scores", "flat"),
    [
        ((1.0, 1.0), True),
        ((0.0, 0.0, None), True),
        ((0.3, 0.3), True),
        ((1.0, 0.0), False),
        ((1.0, None), False),  # one score says nothing
        ((None, None), False),
    ],
)
def test_which_groups_count(scores, flat):
    passing = curriculum(0.9)
    passing.observe([group(Task("a"), *scores)])
    assert any(passing.is_skipped(Task("a")) for _ in range(5)) == flat


def test_rewards_stand_in_where_there_are_no_scores():
    for rewards, flat in (((1.0, 1.0), True), ((1.0, -1.0), False)):
        played = group(Task("a"), *rewards)
        for episode in played.episodes:
            episode.score = None
        passing = curriculum(0.9)
        passing.observe([played])
        metrics = passing.metrics()
        assert (metrics["curriculum/solved_share"], metrics["curriculum/unsolved_share"]) == (0, 0)  # nobody knows
        assert any(passing.is_skipped(Task("a")) for _ in range(5)) == flat


class Levels(TaskSet):
    """Endless tasks of the difficulties 0 to 4, no task twice."""

    size = None

    async def get(self, index):
        return Task(str(index), difficulty=float(index % 5), env="sums")


def test_an_endless_set_goes_by_difficulty():
    passing = curriculum(0.8)
    cursor = TaskCursor(Levels(), 0, passing)
    policy = Policy(lambda task: [1, 1, 0.5, 0, 0][int(task.difficulty)])
    train(cursor, policy, 10, tasks=20)
    passing.metrics()
    steps = train(cursor, policy, 20, tasks=20)
    levels = Counter(group.task.difficulty for groups in steps for group in groups)
    assert min(levels.values()) > 20  # the others are still looked at
    assert levels[2.0] > 3 * max(levels[level] for level in (0.0, 1.0, 3.0, 4.0))
    assert passing.metrics()["curriculum/skipped_share"] == pytest.approx(0.8 * 0.8, abs=0.05)


def test_a_difficulty_is_judged_by_its_latest_groups():
    cursor = TaskCursor(Levels(), 0, curriculum(0.8, memory=4))
    train(cursor, Policy(lambda task: 0.0), 10, tasks=20)
    late = train(cursor, Policy(lambda task: 0.5), 20, tasks=20)
    assert Counter(group.task.difficulty for groups in late[10:] for group in groups) == dict.fromkeys(range(5), 40)


def test_only_so_many_tasks_are_remembered(monkeypatch):
    monkeypatch.setattr("envgym.tasks.curriculum.REMEMBERED", 10)
    passing = curriculum(0.5)
    cursor = TaskCursor(Levels(), 0, passing)
    train(cursor, Policy(lambda task: 0.0), 20, tasks=5)
    assert [len(passing.state()[what]) for what in ("flat", "credit")] == [10, 10]
    assert min(int(key.removeprefix("sums/")) for key in passing.state()["flat"]) > 80  # the latest


def test_metrics_tell_of_what_came_since_they_were_asked_for(through_a_checkpoint):
    passing = curriculum(0.75)
    assert passing.metrics() == {}
    tasks = [Task(str(n)) for n in range(4)]
    passing.observe([group(tasks[0], 1, 1), group(tasks[1], 0, 0), group(tasks[2], 1, 0), group(tasks[3], None, 1)])
    assert told(through_a_checkpoint, passing) == {"curriculum/solved_share": 1 / 3, "curriculum/unsolved_share": 1 / 3}
    passed = [passing.is_skipped(tasks[0]) for _ in range(8)]
    assert (
        told(through_a_checkpoint, passing)
        == {"curriculum/skipped_share": sum(passed) / 8}
        == {"curriculum/skipped_share": 0.75}
    )
    passing.observe([group(tasks[0], 0.5, 0.5), group(tasks[1], 0.4, 0.4)])
    assert told(through_a_checkpoint, passing) == {"curriculum/solved_share": 0.5, "curriculum/unsolved_share": 0.5}


def told(through_a_checkpoint, passing):
    """Its metrics, which are also those of one that goes on from its state."""
    restored = curriculum(0.75)
    restored.load_state(through_a_checkpoint(passing.state()))
    metrics = passing.metrics()
    assert restored.metrics() == metrics
    return metrics


@given(
    kind=st.sampled_from(["finite", "mixed", "levels"]),
    skip=st.floats(0.1, 0.9),
    stop=st.integers(0, 12),
    seed=st.integers(0, 3),
)
@settings(deadline=None, max_examples=30)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(through_a_checkpoint, kind, skip, stop, seed):
    def fresh():
        tasks = {
            "finite": task_set(17),
            "mixed": Interleaved([task_set(5), Levels()], [2, 1]),
            "levels": Levels(),
        }[kind]
        return TaskCursor(tasks, seed, curriculum(skip, seed))

    def outcome(task):  # of the task alone, as in a run that repeats itself
        return random.Random(task.id).choice([0.0, 0.5, 1.0])

    def steps(cursor, first, last):
        return [
            [(g.task.key, [e.score for e in g.episodes]) for g in groups]
            for step in range(first, last)
            for groups in train(cursor, Policy(outcome, size=4, seed=step), 1, tasks=6)
        ]

    whole = steps(fresh(), 0, 20)
    killed = fresh()
    before = steps(killed, 0, stop)
    kept = killed.state()
    steps(killed, stop, stop + 3)  # what it did after the checkpoint is lost, and changes nothing in it
    resumed = fresh()
    resumed.load_state(through_a_checkpoint(kept))
    assert before + steps(resumed, stop, 20) == whole


def test_a_group_of_one_has_nothing_to_compare():
    with pytest.raises(ConfigError, match=r"rollout.group_size must be at least 2"):
        resolve({"env": "math_verify", "learner": "sft", "curriculum": {"skip": 0.5}, "rollout": {"group_size": 1}})


# -- in the loop ------------------------------------------------------------------------------------------


def trainer_of(skip):
    """The real loop over a policy that never solves the even tasks; nothing is sampled and nothing learned."""
    config = resolve(
        {"env": "math_verify", "curriculum": {"skip": skip}, "rollout": {"tasks_per_step": 5, "group_size": 4}}
    )
    policy = Policy(lambda task: 0.5 * (int(task.id) % 2))

    async def play(tasks, play, on_progress, **kept):
        return policy.play(tasks)

    spec = SimpleNamespace(tasks=lambda split: task_set(20))
    runner = SimpleNamespace(spec=spec, agent=OneAgent, roll_out=play, envs_without_scores=set())
    learner = SimpleNamespace(min_group_size=2, roles={}, state_dict=dict)
    components = Components(learner, runner, {}, SamplingParams(max_tokens=4))
    return Trainer(config, config.stages[0], components, RunFolder(Path("unused")), SimpleNamespace(rollout=None))


class OneAgent:
    uses_policy = True
    renderer = NoRenderer()


def test_the_loop_lets_the_curriculum_see_its_groups_and_keeps_what_it_knows(through_a_checkpoint):
    trainer = trainer_of(0.75)
    records = []

    async def steps():
        for _ in range(16):
            trainer.progress.record = {}
            await trainer.groups.collect()
            records.append(trainer.progress.record)

    asyncio.run(steps())
    assert records[0]["curriculum/skipped_share"] == 0
    assert sum(record["curriculum/skipped_share"] for record in records[8:]) / 8 > 0.2
    assert records[0]["curriculum/unsolved_share"] > 0
    state = trainer.checkpoints.state()["cursor"]
    assert sum(state["curriculum"]["flat"].values()) >= 10
    resumed = trainer_of(0.75)
    resumed.groups.cursor.load_state(through_a_checkpoint(state))
    assert asyncio.run(resumed.groups.cursor.next(20)) == asyncio.run(trainer.groups.cursor.next(20))


def test_the_loop_without_a_curriculum_says_nothing_of_one():
    trainer = trainer_of(0.0)
    asyncio.run(trainer.groups.collect())
    assert not [key for key in trainer.progress.record if key.startswith("curriculum/")]
