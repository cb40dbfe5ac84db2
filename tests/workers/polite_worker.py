"""The worker of the Ray tests."""

import asyncio
import os

from envgym.errors import ConfigError


class Worker:
    def __init__(self, greeting="hello"):
        if greeting == "rude":
            raise ConfigError("be polite")
        self.greeting = greeting
        self.event = asyncio.Event()
        self.parked = []

    def greet(self, name):
        return f"{self.greeting} {name}", os.environ.get("MOOD")

    async def wait(self):
        await self.event.wait()
        return "woken"

    async def wake(self):
        self.event.set()

    async def park(self, number, load):
        self.parked.append(number)
        await self.event.wait()
        return number

    def parking(self):
        return self.parked

    async def be_cancelled(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.parked.append("cancelled")

    def fail(self, kind):
        if kind == "user":
            raise ConfigError("no such key")
        raise ZeroDivisionError("by zero\nand more")
