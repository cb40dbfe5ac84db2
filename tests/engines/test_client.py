"""The controller's end of an engine: how long it waits for one that hangs, and for one that is only slow."""

import asyncio

import pytest

from envgym.engine import Request, SamplingParams
from envgym.engines import pool as engines
from envgym.engines.pool import EngineClient
from envgym.errors import WorkerDied, WorkerError
from envgym.processes.runtime import WorkerHandle

REQUEST = Request("r", (1, 2), SamplingParams(max_tokens=4))


class Handle(WorkerHandle):
    """A worker whose engine answers `generate` and `score` when `answered` is set, and meanwhile takes a step between
    two looks (`moves`), none, or does not say so (`silent`)."""

    def __init__(self, kind):
        self.kind = kind
        self.looks = 0
        self.cancelled = 0
        self.answered = asyncio.Event()

    async def close(self):
        pass

    async def send(self, message):
        method, *_ = message
        if method == "steps":
            self.looks += 1
            if self.looks == 5 * engines.PATIENCE:
                self.answered.set()
            if self.kind == "gone":
                raise WorkerError("the worker has been closed")
            return await self.never() if self.kind == "silent" else self.looks * (self.kind == "moves")
        try:
            await (self.answered.wait() if method in ("generate", "score") else self.never())
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return method

    async def never(self):
        await asyncio.Event().wait()


@pytest.fixture
def ask(monkeypatch):
    """ask(kind, body) -> what `body(client, handle)` gives, over an engine of that kind; looking takes no time."""
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.001)

    async def main(kind, body):
        handle = Handle(kind)
        return await body(EngineClient(handle), handle)

    return lambda kind, body: asyncio.run(main(kind, body))


@pytest.mark.parametrize("kind", ["paused", "silent"])
def test_an_engine_that_stands_still_is_as_good_as_dead(ask, kind):
    async def body(engine, handle):
        calls = [engine.generate(REQUEST), engine.generate(REQUEST), engine.score((1, 2))]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [WorkerDied] * 3
        assert handle.cancelled == 3  # the engine is told, should it still listen
        return str(errors[0])

    assert "the engine has taken no step for" in ask(kind, body)


def test_an_answer_may_take_as_long_as_it_needs_while_the_engine_moves(ask):
    async def body(engine, handle):
        answers = await asyncio.gather(engine.generate(REQUEST), engine.score((1, 2)))
        assert handle.looks >= 5 * engines.PATIENCE
        return answers

    assert ask("moves", body) == ["generate", "score"]


def test_it_is_watched_again_after_it_was_idle(ask):
    async def body(engine, handle):
        handle.answered.set()
        assert await engine.generate(REQUEST) == "generate"
        handle.answered.clear()
        with pytest.raises(WorkerDied, match="no step"):
            await engine.generate(REQUEST)

    ask("paused", body)


def test_a_call_given_up_by_its_caller_is_cancelled_as_ever(ask):
    async def body(engine, handle):
        asking = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        with pytest.raises(TimeoutError):  # the caller's own limit is none of ours
            async with asyncio.timeout(0):
                await engine.generate(REQUEST)
        assert handle.cancelled == 2

    ask("moves", body)


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("end_weights", lambda client: client.call(lambda engine: engine.end_weights(1, 1))),
        ("begin_weights", lambda client: client.call(lambda engine: engine.begin_weights())),
        ("info", lambda client: client.info()),
    ],
)
def test_other_calls_have_a_deadline(ask, method, call, monkeypatch):
    monkeypatch.setattr(engines, "CALL_SECONDS", 0.0)

    async def body(engine, handle):
        with pytest.raises(WorkerDied, match=f"the engine hangs: {method} did not end"):
            await call(engine)

    ask("paused", body)


class Pair:
    """The engine that a test asks, and the pool's word for when another one moved: at the looks in `moves`."""

    def __init__(self, kind, moves):
        self.handle = Handle(kind)
        self.engine = EngineClient(self.handle)
        self.engine.others_moved_at = lambda: asyncio.get_running_loop().time() if moves(self.handle.looks) else -1.0


@pytest.mark.parametrize("kind", ["paused", "silent"])
@pytest.mark.parametrize(
    "ask_for",
    [lambda client: client.generate(REQUEST), lambda client: client.call(lambda engine: engine.end_weights(1, 1))],
)
def test_beside_an_engine_that_moves_little_patience_is_enough(kind, ask_for, monkeypatch):
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.001)

    async def main():
        pair = Pair(kind, lambda looks: True)
        with pytest.raises(WorkerDied, match="the engine ha"):
            await ask_for(pair.engine)
        return pair.handle.looks

    assert asyncio.run(main()) <= engines.PATIENCE_BESIDE_OTHERS + 1


def test_an_engine_that_moves_is_never_given_up_for_another_that_does(monkeypatch):
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.001)

    async def main():
        pair = Pair("moves", lambda looks: True)
        return await pair.engine.generate(REQUEST)

    assert asyncio.run(main()) == "generate"


def test_what_another_did_before_this_one_stood_still_says_nothing(monkeypatch):
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.001)

    async def main():
        handle = Handle("paused")
        engine = EngineClient(handle)
        before = asyncio.get_running_loop().time()
        engine.others_moved_at = lambda: before
        with pytest.raises(WorkerDied, match="no step"):
            await engine.generate(REQUEST)
        return handle.looks

    assert asyncio.run(main()) >= engines.PATIENCE
