"""Listening: the URL of an address, and work that the end of a server cuts short."""

from __future__ import annotations

import asyncio

import pytest

from envgym.errors import ConfigError
from envgym.net.listening import listen, until_stopped, url_of


def test_an_address_is_one_url():
    with listen("127.0.0.1", 0, refusal="") as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            listen("127.0.0.1", listener.getsockname()[1], refusal="").close()


def test_work_ends_by_itself_or_with_the_server():
    async def main():
        stopping = asyncio.Event()
        assert await until_stopped(asyncio.sleep(0), stopping)
        with pytest.raises(ConfigError, match="refused"):
            await until_stopped(fails(), stopping)
        stopping.set()
        assert not await until_stopped(asyncio.sleep(30), stopping)

    async def fails():
        raise ConfigError("refused")

    asyncio.run(main())
