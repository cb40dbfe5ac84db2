"""Weight sync: the actor's weights are sent to the engines, and a probe checks that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from envgym.engines.client import EngineClient
from envgym.engines.pool import EnginePool
from envgym.errors import RunError, WorkerDied
from envgym.learner import TrainSample
from envgym.render import Renderer
from envgym.types import Observation, Row, Segment, int_array
from envgym.workers.group import WorkerGroup

from .turns import GpuTimeshare
from .weight_transfer import FileTransfer, Receipt, Transfer, refuse_replacement

MEAN_SHARE = 0.12
"""The largest mean difference on the probe, as a share of the tolerance of a single one. In bfloat16 a right sync has
at most 0.041 nats, one with two experts of a layer swapped 0.072 and more (`benchmarks/sync_families.py`)."""
PROBE = "The quick brown fox jumps over the lazy dog 0123456789 times."


@dataclass(slots=True)
class WeightSync:
    """Sends the actor's weights, or its LoRA adapter alone, to the engines. `tolerance` is the largest difference in
    log-probability, in nats, at which the two count as the same policy."""

    engine: EnginePool
    actor: WorkerGroup
    renderer: Renderer
    tolerance: float
    transfer: Transfer
    files: FileTransfer
    """The transfer of an adapter, and once of its base."""
    timeshare: GpuTimeshare
    base_is_quantized: bool = False
    """The actor's frozen weights were quantized to 4 bits, and so differ from those of the folder that engines load."""
    weights_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the update of the actor's weights until the engines have them."""
    version: int | None = None
    """The policy version of the engines."""
    receipt: Receipt | None = None
    """The last transfer of weights."""

    def __post_init__(self) -> None:
        self.engine.join = self.join

    async def __call__(self, version: int) -> float | None:
        """Load the actor's weights into the engines as policy `version`.

        Returns the largest difference in log-probability (nats) of any engine on the probe; None if every engine died:
        replacements get this version when they join. Raises `RunError` beyond the tolerance.
        """
        actor_logprobs = await self._probe_logprobs()

        async def send() -> None:
            await self._send(self.engine, version, with_base=self.version is None)

        await self.timeshare.hand_over(send)
        self.version = version
        differences = await self._differences(self.engine, actor_logprobs)
        for of_engine in differences:
            self._check_probe(f"the probe after sync {version}", of_engine)
        return max(map(max, differences), default=None)

    async def join(self, engine: EngineClient) -> None:
        """Give a replacement engine the weights of the current version; waits while the actor's are being updated."""
        async with self.weights_lock:
            if self.version is None:  # the first sync will include it
                return
            pool = EnginePool(refuse_replacement, [engine])
            async with self.timeshare.actor_on_device():
                actor_logprobs = await self._probe_logprobs()
                await self._send(pool, self.version, with_base=True)
            differences = await self._differences(pool, actor_logprobs)
            if not differences:
                raise WorkerDied("it died while it was given the weights")
            self._check_probe("the probe of a restarted engine", differences[0])

    async def _send(self, engine: EnginePool, version: int, *, with_base: bool) -> None:
        adapter = self.actor.info.adapter
        if not adapter or (self.base_is_quantized and with_base):
            self.receipt = await (self.files if adapter else self.transfer).send(engine, version)
        if adapter:
            await self._send_adapter(engine, version)

    async def _send_adapter(self, engine: EnginePool, version: int) -> None:
        folder = await self.files.shared_path(engine, 8 * self.actor.info.n_trained)
        try:
            await self.actor.on_all("export_adapter", str(folder))
            await engine.call("load_adapter", str(folder), version)
        finally:
            await self.actor.on_first("withdraw", str(folder))

    async def _probe_logprobs(self) -> list[float]:
        """The actor's log-probabilities of the probe."""
        # As an action: workers compute no log-probabilities of other tokens.
        [scored] = await self.actor.forward([TrainSample.from_row(Row([Segment("action", int_array(self._probe))]))])
        logprobs: list[float] = scored[1:].tolist()
        return logprobs

    async def _differences(self, engines: EnginePool, actor_logprobs: Sequence[float]) -> list[list[float]]:
        """Each engine's differences from the actor's log-probabilities of the probe."""
        return [
            [abs(actor - engine) for actor, engine in zip(actor_logprobs, sampled, strict=True)]
            for sampled in await engines.probe(tuple(self._probe))
        ]

    @property
    def _probe(self) -> list[int]:
        return self.renderer.prompt(Observation(text=PROBE))

    def _check_probe(self, subject: str, differences: Sequence[float]) -> None:
        """Raise `RunError` if the differences are too large, one of them or their mean."""
        probe = f"{subject} of {len(differences)} tokens (largest difference {max(differences):.2g})"
        self.check(probe, fmean(differences), MEAN_SHARE)  # first, since `max` may drop a NaN
        self.check(subject, max(differences))

    def check(self, subject: str, difference: float, share: float = 1.0) -> None:
        """Raise `RunError` if sampler and trainer differ by more than this share of the tolerance, or by NaN."""
        if not difference <= share * self.tolerance:
            of_tolerance, on_average = (f"{share:.0%} of ", " on average") if share < 1 else ("", "")
            raise RunError(
                f"sampler and trainer disagree on {subject}: log-probabilities differ by {difference:.2g}{on_average}, "
                f"more than {of_tolerance}sync.tolerance={self.tolerance:g}. The engine does not hold the actor's "
                "weights, or computes differently (dtype, kernels)"
            )
