"""The images of a run: stored once, named in every record, and read back with them."""

import asyncio
import contextlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import envgym
from envgym.agent import Agent
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.disk import replacement_file
from envgym.engine import SamplingParams
from envgym.episodes.files import Journal, episode_line, read_episodes, write_episodes
from envgym.episodes.record import write_rollouts
from envgym.errors import DataError
from envgym.images import ImageFolder, images_of
from envgym.jobs.components import stage_context
from envgym.render import NoRenderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.run_folder import RunFolder, state_from_json, state_to_json
from envgym.types import Episode, Group, ImagePart, ImageSpan, Message, Outcome, Row, Segment, StopReason, Task, Turn
from envgym.types.images import decoded
from tests.chat_api import api
from tests.pictures import environment, picture


def episode_of(*images, text="And?"):
    """An episode that shows images in its task, its prompt and its feedback, with placeholders (token 7)."""
    spans = [ImageSpan(image.sha256, 1, 3) for image in images]
    turn = Segment("action", [4, 0], logprobs=[-0.5, -0.25])
    segments = [Segment("prompt", [1, 7, 7, 7, 2], images=tuple(spans[:1])), turn]
    if len(images) > 1:
        segments += [Segment("feedback", [9, 7, 7, 7], images=(spans[1],)), replace(turn)]
    messages = [Message("user", ["Which?", *images[:1]]), Message.assistant("red")]
    messages += [Message("user", [image, text]) for image in images[1:]]
    row = Row(segments, turns=[Turn(1.0, StopReason.STOP)])
    return Episode("a:0", Task("t", tuple(messages[:1])), Outcome.finish(), [row], 1.0, 1.0, messages=messages)


@pytest.fixture
def folder(tmp_path):
    return ImageFolder(tmp_path / "images")


@pytest.fixture
def stored(folder):
    """Two stored images."""
    return [folder.store(decoded(ImagePart.from_value(picture(seed)))) for seed in (1, 2)]


# -- the folder -------------------------------------------------------------------------------------------------


def test_an_image_is_stored_once_and_marked_as_used(folder):
    image = decoded(ImagePart.from_value(picture()))
    assert not folder.path.exists()
    kept = folder.store(image)
    assert (kept, kept.data) == (image, None)
    assert kept.file == folder.find(image.sha256) == folder.path / f"{image.sha256}.png"
    assert kept.read() == picture()
    os.utime(kept.file, (1, 1))
    changed = kept.file.stat().st_ino
    folder.store(image)
    assert kept.file.stat().st_ino == changed
    assert kept.file.stat().st_mtime > 1
    assert [path.name for path in folder.path.iterdir()] == [kept.file.name]
    kept.file.write_bytes(picture()[:50])  # what a full disk or a lost machine left
    folder.store(image)
    assert kept.read() == picture()


@pytest.mark.parametrize("name", ["../secret", "..", "", "a" * 63, "A" * 64, f"{'a' * 64}/../../secret"])
def test_only_a_name_is_looked_for(tmp_path, folder, name):
    folder.path.mkdir()
    (tmp_path / "secret.png").write_bytes(picture())
    assert folder.find(name) is None


def test_a_file_that_was_swapped_is_not_the_image(folder, stored):
    first, second = stored
    first.file.write_bytes(second.read())
    with pytest.raises(DataError, match=f"{first.sha256}.png has changed: its content is not what it is named after"):
        first.read()
    first.file.unlink()
    with pytest.raises(DataError, match=f"{first.sha256}.png cannot be read: No such file"):
        first.read()


def test_episodes_that_show_one_image_at_a_time_write_it_one_after_the_other(folder, monkeypatch):
    image, together = decoded(ImagePart.from_value(picture(3))), threading.Barrier(2)

    @contextlib.contextmanager
    def replacement(path, suffix):
        with pytest.raises(threading.BrokenBarrierError):
            together.wait(0.2)
        with replacement_file(path, suffix) as temporary:
            yield temporary

    monkeypatch.setattr("envgym.images.replacement_file", replacement)
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(folder.store, [image] * 4))
    assert [part.read() for part in parts] == [image.data] * 4


def test_two_processes_may_store_one_image_at_a_time(folder, monkeypatch):
    image, write_bytes = decoded(ImagePart.from_value(picture(3))), Path.write_bytes

    def write(path, content):
        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        write_bytes(path, content)
        assert ImageFolder(folder.path).store(image).read() == image.data  # the other process, meanwhile

    monkeypatch.setattr(Path, "write_bytes", write)
    assert folder.store(image).read() == image.data
    assert len([*folder.path.iterdir()]) == 1


# -- records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["episodes.jsonl", "episodes.parquet"])
def test_an_episode_is_read_back_with_its_images(tmp_path, stored, name):
    episode = episode_of(*stored)
    write_episodes(tmp_path / name, [episode, episode_of()])
    again, text = read_episodes(tmp_path / name)
    assert [again, text] == [episode, episode_of()]
    assert again.rows[0].images == tuple(ImageSpan(i.sha256, n, 3) for i, n in zip(stored, (1, 8), strict=True))
    for message, original in zip(
        [*again.messages, *again.task.prompt], [*episode.messages, *episode.task.prompt], strict=True
    ):
        assert message.content == original.content
        assert [image.read() for image in message.images] == [image.read() for image in original.images]
    assert stored[0].read() not in (tmp_path / name).read_bytes()


def test_a_record_without_its_folder_has_names(tmp_path, stored):
    (tmp_path / "other").mkdir()
    write_episodes(tmp_path / "other" / "a.jsonl", [episode_of(*stored)])
    os.rename(tmp_path / "images", tmp_path / "a.jsonl.images")
    os.rename(tmp_path / "other" / "a.jsonl", tmp_path / "a.jsonl")
    assert read_episodes(tmp_path / "a.jsonl")[0].messages[0].images[0].read() == picture(1)
    os.rename(tmp_path / "a.jsonl.images", tmp_path / "elsewhere")
    [episode] = read_episodes(tmp_path / "a.jsonl")
    assert episode == episode_of(*stored)
    with pytest.raises(DataError, match="is known here by its name alone: its run's folder has the file"):
        episode.messages[0].images[0].read()


def test_only_a_file_with_images_has_their_columns(tmp_path, stored):
    write_rollouts(tmp_path / "text.parquet", [episode_of()])
    write_rollouts(tmp_path / "images.parquet", [episode_of(), episode_of(*stored)])
    text, images = (str(pq.read_schema(tmp_path / f"{name}.parquet")) for name in ("text", "images"))
    assert ("parts" in text, "images" in text) == (False, False)
    assert ("parts" in images, "images" in images) == (True, True)
    assert '"parts"' not in episode_line(episode_of())
    assert '"images"' not in episode_line(episode_of())


def test_a_row_of_pictures_without_messages_keeps_its_spans(tmp_path, stored):
    episode = replace(episode_of(*stored), messages=[])
    write_rollouts(tmp_path / "a.parquet", [episode])
    assert read_episodes(tmp_path / "a.parquet") == [episode]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda record: record["messages"][0]["parts"][1].update(sha256="../../x"), "64 hexadecimal digits"),
        (lambda record: record["messages"][0]["parts"][1].update(width="9"), "the size of an image is two numbers"),
        (lambda record: record["messages"][0]["parts"][1].update(media_type="text/html"), "a PNG, JPEG or WebP file"),
        (lambda record: record["rows"][0]["segments"][0]["images"][0].update(start=4), "is not within 5 tokens"),
    ],
)
def test_a_record_with_a_wrong_image_is_one_line(tmp_path, stored, change, problem):
    record = json.loads(episode_line(episode_of(*stored)))
    change(record)
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=rf"a.jsonl, line 1: this is not an episode \(ValueError: .*{problem}") as error:
        read_episodes(tmp_path / "a.jsonl")
    assert "\n" not in str(error.value)


def test_a_checkpoint_holds_the_images_of_its_buffered_groups(stored):
    episode = episode_of(*stored)
    text = state_to_json({"progress": {"step": 1}, "groups": [Group("g", episode.task, [episode])]})
    [group] = state_from_json(text)["groups"]
    assert group.episodes == [episode]
    assert group.task == episode.task


# -- rows -------------------------------------------------------------------------------------------------------


def test_a_row_is_truncated_before_an_image_and_never_in_it(stored):
    first, second = (image.sha256 for image in stored)
    lengths = {}
    for length in range(1, 14):
        row = episode_of(*stored).rows[0]
        row.truncate(length)
        lengths[length] = len(row)
        whole = [ImageSpan(first, 1, 3)] * (length >= 4) + [ImageSpan(second, 8, 3)] * (length >= 11)
        assert row.images == tuple(whole)
        assert list(row.token_ids).count(7) == 3 * len(whole)
        for segment in row.segments:
            replace(segment)  # its spans are within it
    assert list(lengths.values()) == [1, 1, 1, 4, 5, 6, 7, 8, 8, 8, 11, 12, 13]


def test_a_row_for_workers_has_its_images(stored):
    row = episode_of(*stored).rows[0].without_record()
    assert row.segments == []
    assert [(span.sha256, span.start, span.length) for span in row.images] == [
        (image.sha256, start, 3) for image, start in zip(stored, (1, 8), strict=True)
    ]


def test_spans_of_a_segment_are_in_order_and_within_it():
    name = "a" * 64
    for spans in ([(0, 0)], [(-1, 2)], [(3, 3)], [(2, 2), (0, 2)], [(0, 3), (2, 2)]):
        with pytest.raises(ValueError, match="is not within 5 tokens, after the image before it"):
            Segment("prompt", [1] * 5, images=tuple(ImageSpan(name, *span) for span in spans))
    Segment("prompt", [1] * 5, images=(ImageSpan(name, 0, 3), ImageSpan(name, 3, 2)))


# -- runs -------------------------------------------------------------------------------------------------------


def steps_of(tmp_path, *images):
    """A run's folder with a step of rollouts per image, each an hour after the one before, the last of them now."""
    run = RunFolder(tmp_path / "run")
    run.create()
    parts, start = [], time.time() - 3700 * (len(images) - 1)
    for step, image in enumerate(images):
        parts.append(run.images.store(decoded(ImagePart.from_value(image))))
        write_rollouts(run.rollout_file(step), [episode_of(parts[-1])])
        for path in (parts[-1].file, run.rollout_file(step)):
            os.utime(path, (start + 3700 * step,) * 2)
    return run, parts


def test_old_images_go_with_the_files_that_name_them(tmp_path):
    run, parts = steps_of(tmp_path, *map(picture, range(6)))
    run.held_out.mkdir()
    write_rollouts(run.held_out_file(0), [episode_of(parts[1])])
    state = {"progress": {"step": 2}, "groups": [Group("g", Task("t"), [episode_of(parts[2])])]}
    run.add_checkpoint(run.new_checkpoint(), 2, state_to_json(state), None, 1)
    run.remove_old_files({"rollouts": None, "learned": 1})
    assert all(part.file.exists() for part in parts)
    run.remove_old_files({"rollouts": 2})
    assert [part.file.exists() for part in parts] == [False, True, True, False, True, True]


def test_an_image_that_is_in_use_stays(tmp_path):
    run, parts = steps_of(tmp_path, *map(picture, range(4)))
    recent = run.images.store(decoded(ImagePart.from_value(picture(9))))  # of an episode that runs
    run.images.store(decoded(parts[0]))
    run.remove_old_files({"rollouts": 1})
    assert [part.file.exists() for part in parts] == [True, False, False, True]
    assert recent.file.exists()


def test_a_stage_stores_images_in_its_folder_also_those_of_a_mixtures_members(tmp_path):
    settings = {"env": {"name": "mixture", "members": {"a": "tool_use", "b": "math_verify"}}, "model": "m"}
    config = resolve({**settings, "engine": {"kind": "openai", "base_url": "http://h/v1"}})
    folder = RunFolder(tmp_path / "run")
    folder.create()

    async def main():
        async with stage_context(config, config.stages[0], folder) as context:
            return [part.images.path for part in (context.spec, *context.spec.parts())]

    assert asyncio.run(main()) == [folder.path / "images"] * 3


def roll_out(tmp_path, capsys, command, *words):
    """The output of a command whose policy is an API, and what that API was asked."""
    with api(lambda body: (200, {"content": "red"})) as (url, bodies):
        api_words = ["engine.kind=openai", f"engine.base_url={url}", "--model", "m"]
        env = str(environment(tmp_path))
        status = main([command, "--env", env, *api_words, *words])
    output = "".join(capsys.readouterr())
    assert status == 0, output
    return output, bodies[1:]


def images_in(episodes):
    return [image for episode in episodes for message in episode.messages for image in message.images]


def test_an_evaluation_stores_what_the_policy_saw(tmp_path, capsys):
    _, bodies = roll_out(tmp_path, capsys, "eval", f"evals_dir={tmp_path}", "eval.tasks=6", "--name", "e")
    episodes = read_episodes(tmp_path / "e")
    images = images_in(episodes)
    assert len(images) == 36  # sampled, and greedy
    assert all(image.data is None and image.file.parent == tmp_path / "e" / "images" for image in images)
    files = sorted(path.stem for path in (tmp_path / "e" / "images").iterdir())
    assert files == sorted({image.sha256 for image in images})
    asked = {part["image_url"]["url"] for body in bodies for m in body["messages"] for part in m["content"][:2]
             if isinstance(part, dict) and part["type"] == "image_url"}  # fmt: skip
    seen = {image.data_uri() for episode in episodes for m in episode.messages[:-1] for image in m.images}
    assert asked == seen


def test_a_tasks_images_are_stored_even_if_the_policy_does_not_see_them(tmp_path):
    class Blind(envgym.Env):
        async def reset(self, *, seed=None, options=None):
            return [Message.user("Guess.")], {}

        async def step(self, action):
            return None, 1.0, True, False, {}

    class Answers(Agent):
        async def run(self, env, task, sampler, *, seed):
            await env.reset(options={"task": task})
            return Episode("", task, Outcome.finish())

    spec = envgym.EnvSpec("blind", Blind)
    spec.store_images(ImageFolder(tmp_path / "images"))
    task, broken = (Task("t", (Message.user(content),)) for content in (picture(5), picture(6, 200)[:5000]))
    runner = Runner(
        spec,
        Answers(NoRenderer(), Answers.Config()),
        None,
        RolloutConfig(),
        max_model_len=0,
        seed=0,
        deterministic=False,
    )
    groups = asyncio.run(runner.roll_out([task, broken], SamplingPlan("p", SamplingParams(1), 1)))
    assert [episode.outcome.reason for group in groups for episode in group.episodes] == ["", "invalid_environment"]
    assert [path.read_bytes() for path in (tmp_path / "images").iterdir()] == [picture(5)]
    assert groups[1].episodes[0].outcome.message.endswith("(image file is truncated); the prompt of task t has it")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_of_episodes_has_its_images_beside_it(tmp_path, capsys, suffix):
    out = tmp_path / f"a.{suffix}"
    roll_out(tmp_path, capsys, "rollout", "--out", str(out), "--tasks", "0:3")
    images = images_in(read_episodes(out))
    assert {image.file.parent.name for image in images} == {f"a.{suffix}.images"}
    assert all(image.read() for image in images)
    assert images_of(out).path == tmp_path / f"a.{suffix}.images"
    assert not (tmp_path / f"a.{suffix}.unfinished").exists()


def test_ten_thousand_pictures_in_a_row_are_not_held_in_memory(tmp_path):
    class Noise(envgym.Env):
        async def reset(self, *, seed=None, options=None):
            return self.noise(), {}

        async def step(self, action):
            return self.noise(), 0.0, False, False, {}

        def noise(self):
            return [Message.user(*self.np_random.integers(0, 256, (100, 48, 48, 3), np.uint8))]  # 7 kB each

    async def main():
        spec = envgym.EnvSpec("noise", Noise)
        spec.store_images(ImageFolder(tmp_path / "images"))
        messages, start = [], 0
        async with spec, spec.make() as env:
            await env.reset(options={"task": Task("t")})
            for step in range(100):
                observation, *_ = await env.step("x")
                messages += observation.messages
                if step == 10:
                    start = resident()
        images = [image for message in messages for image in message.images]
        assert len({image.sha256 for image in images}) == 10_000
        assert all(image.data is None for image in images)
        return resident() - start

    assert asyncio.run(main()) < 25e6


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_journal_names_the_images_of_an_unfinished_file(tmp_path, stored):
    folder = ImageFolder(tmp_path / "out.jsonl.images")
    image = folder.store(decoded(stored[0]))
    (tmp_path / "out.jsonl.unfinished").mkdir()
    journal = Journal(tmp_path / "out.jsonl.unfinished" / "episodes.jsonl", folder)
    journal.open()
    journal.write(episode_of(image))
    [episode] = journal.latest().values()
    assert episode.messages[0].images[0].file == image.file
