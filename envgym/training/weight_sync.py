"""New weights to the engines, and proof that they arrived."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from envgym.engines.client import EngineClient
from envgym.engines.pool import EnginePool
from envgym.errors import RunError, WorkerDied
from envgym.learner import TrainSample
from envgym.render import Renderer
from envgym.types import Observation, Row, Segment, int_array
from envgym.workers.group import WorkerGroup

from .turns import Turns
from .weight_transfer import FileTransfer, Receipt, Transfer, no_other

PROBE = "The quick brown fox jumps over the lazy dog 0123456789 times."


@dataclass(slots=True)
class WeightSync:
    """Carries what the actor learned to the engines: its weights, or its LoRA adapter alone. `tolerance` is the largest
    difference in log-probability, in nats, at which the two still count as the same policy."""

    engine: EnginePool
    actor: WorkerGroup
    renderer: Renderer
    tolerance: float
    transfer: Transfer
    files: FileTransfer
    """The transfer of what is no whole model: an adapter, or its base, once."""
    turns: Turns
    base_is_quantized: bool = False
    """The actor's frozen weights are not those of the folder that the engines load, but went through 4 bits."""
    whole: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the actor's weights are on their way from one version to the next."""
    version: int | None = None
    """The version that the engines have."""
    receipt: Receipt | None = None
    """The last transfer of weights."""

    def __post_init__(self) -> None:
        self.engine.join = self.join

    async def __call__(self, version: int) -> float | None:
        """Load the actor's weights into the engines as policy `version`; returns how far they differ on a probe, the
        one that differs most. None where all have died: those in their places will be given it.

        Raises `RunError` beyond the tolerance.
        """
        ours = await self._score_probe()

        async def send() -> None:
            await self._send(self.engine, version, with_base=self.version is None)

        await self.turns.hand_over(send)
        self.version = version
        differences = await self._differences(self.engine, ours)
        for difference in differences:
            self.check(f"the probe after sync {version}", difference)
        return max(differences, default=None)

    async def join(self, engine: EngineClient) -> None:
        """Bring an engine that was started later to the version of the others, once the actor has it."""
        async with self.whole:
            if self.version is None:  # the first sync is yet to come
                return
            pool = EnginePool(no_other, [engine])
            async with self.turns.actor():
                ours = await self._score_probe()
                await self._send(pool, self.version, with_base=True)
            differences = await self._differences(pool, ours)
            if not differences:
                raise WorkerDied("it died while it was given the weights")
            self.check("the probe of an engine that was started anew", differences[0])

    async def _send(self, engine: EnginePool, version: int, *, with_base: bool) -> None:
        adapter = self.actor.info.adapter
        if not adapter or (self.base_is_quantized and with_base):
            self.receipt = await (self.files if adapter else self.transfer).send(engine, version)
        if adapter:
            await self._send_adapter(engine, version)

    async def _send_adapter(self, engine: EnginePool, version: int) -> None:
        folder = await self.files.place(engine, 8 * self.actor.info.n_trained)
        try:
            await self.actor.export_adapter(str(folder))
            await engine.tell("load_adapter", str(folder), version)
        finally:
            await self.actor.on_first("withdraw", str(folder))

    async def _score_probe(self) -> list[float]:
        """The actor's log-probabilities of the probe."""
        # As if it were an action: tokens that do not count are not scored.
        [scored] = await self.actor.forward([TrainSample.of(Row([Segment("action", int_array(self._probe))]))])
        ours: list[float] = scored[1:].tolist()
        return ours

    async def _differences(self, engine: EnginePool, ours: Sequence[float]) -> list[float]:
        """The difference of each engine's sums from the actor's `ours`."""
        return [_largest(ours, sampled) for sampled in await engine.probe(tuple(self._probe))]

    @property
    def _probe(self) -> list[int]:
        return self.renderer.prompt(Observation(text=PROBE))

    def check(self, where: str, difference: float) -> None:
        """Raise `RunError` where sampler and trainer differ by more than the tolerance (or by NaN)."""
        if not difference <= self.tolerance:
            raise RunError(
                f"sampler and trainer disagree on {where}: log-probabilities differ by {difference:.2g}, more than "
                f"sync.tolerance={self.tolerance:g}. The engine does not hold the actor's weights, or computes "
                "differently (dtype, kernels)"
            )


def _largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    differences = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)  # `max` alone may lose a NaN
