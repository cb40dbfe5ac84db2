"""Environments with a planted weakness, and sound ones: a right answer earns all in each of them.

They were written before the cheats of `envgym envs attack`, and are not changed for them.
"""

import asyncio
from pathlib import Path

import pytest

from envgym.check.scripts import demonstration_script
from envgym.check.subject import Subject
from envgym.registry import spec
from envgym.services import start_services

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*/weak/*.py")) + sorted(FOLDER.glob("*/sound/*.py"))


def test_there_are_fourteen_weak_ones_and_six_sound_ones():
    assert [len(list((FOLDER / "planted" / kind).glob("*.py"))) for kind in ("weak", "sound")] == [14, 6]


@pytest.mark.parametrize("file", FILES, ids=["-".join(file.with_suffix("").parts[-3:]) for file in FILES])
def test_a_right_answer_earns_all_and_there_are_fifty_tasks(file):
    async def main():
        env_spec = spec(str(file))
        async with start_services(env_spec):
            subject = Subject(env_spec, str(file), {})
            tasks = await subject.tasks(50)
            episodes = [
                await subject.play(task, seed, demonstration_script(subject.demonstrations(task)[0]))
                for seed, task in enumerate(tasks[:4])
            ]
        return len(tasks), [episode.result.score for episode in episodes]

    assert asyncio.run(main()) == (50, [1.0] * 4)
