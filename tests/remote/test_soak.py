"""Two thousand sessions at once: none is lost, and the server's memory does not grow from one round to the next."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import envgym.registry as registry
from envgym.remote.client import RemoteEnvSpec
from envgym.types import Action

SESSIONS = 2000
STEPS = 4
ROUNDS = 3
GROWTH = 1.05
"""What the resident memory of a later round may be of the second's."""


def resident(pid: int) -> float:
    """MiB of a process in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


async def play_all(spec: RemoteEnvSpec) -> int:
    """Open every session, hold them all open together, and step each with pauses. Returns the steps taken."""
    meeting = asyncio.Barrier(SESSIONS)

    async def one(number: int) -> int:
        rng, env = random.Random(number), spec.make()
        try:
            await env.reset(seed=number)
            await meeting.wait()
            for turn in range(1, STEPS + 1):
                await asyncio.sleep(rng.random() * 2)
                *_, info = await env.step(Action("no"))
                assert info["turns"] == turn
            await meeting.wait()
            return turn
        finally:
            await env.close()

    return sum(await asyncio.gather(*(one(number) for number in range(SESSIONS))))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_sessions_are_none_too_many_and_leave_nothing(start):
    server = start("GuessSpec", "limit.lease_seconds=20")
    memory = []

    async def main() -> None:
        async with registry.spec(server.url) as spec:
            for _ in range(ROUNDS):
                assert await play_all(spec) == SESSIONS * STEPS
                memory.append(resident(server.process.pid))
            assert (spec.counters.retries, spec.counters.failures) == (0, 0)
            assert len(spec.replicas.pick_any().leases) == 0

    asyncio.run(main())
    print(f"the server's resident memory after each round, MiB: {[round(size, 1) for size in memory]}")
    assert memory[-1] <= GROWTH * memory[1]
