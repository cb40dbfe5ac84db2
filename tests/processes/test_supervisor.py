"""Workers of which a dead one is replaced."""

import asyncio
from dataclasses import dataclass

import pytest

from envgym.errors import WorkerDied
from envgym.processes.supervisor import Supervisor


@dataclass
class Member:
    number: int


class Limited(Supervisor):
    async def _start_again(self, member):
        raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_worker_that_the_system_does_not_start_again_ends_the_wait_for_it():
    async def main():
        supervisor = Limited("engines", 1, lambda line: None)
        supervisor._add(Member(0))
        supervisor._lose(supervisor.members[0], "engine 0 has ended")
        with pytest.raises(WorkerDied, match="engine 0 has ended; another one could not be started: "):
            await asyncio.wait_for(supervisor._live_members(), 10)

    asyncio.run(main())
