"""New weights to the engine, and proof that they arrived."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from envgym.engines.base import Engine
from envgym.errors import RunError
from envgym.learner import TrainSample
from envgym.render import Renderer
from envgym.types import Observation, Row, Segment, int_array
from envgym.workers.group import WorkerGroup

PROBE = "The quick brown fox jumps over the lazy dog 0123456789 times."


@dataclass(slots=True)
class WeightSync:
    """Carries what the actor learned to the engine: its weights, or its LoRA adapter alone. `tolerance` is the largest
    difference in log-probability, in nats, at which the two still count as the same policy."""

    engine: Engine
    actor: WorkerGroup
    renderer: Renderer
    tolerance: float
    base_is_quantized: bool = False
    """The actor's frozen weights are not those of the folder that the engine has loaded, but went through 4 bits."""

    async def __call__(self, version: int) -> float:
        """Load the actor's weights into the engine as policy `version`; returns how far the two differ on a probe.

        Raises `RunError` beyond the tolerance.
        """
        info = self.actor.info
        if not info["adapter"]:
            await self._send_weights(version)
        else:
            if self.base_is_quantized:
                await self._send_weights(version)
                self.base_is_quantized = False  # the engine has them now
            await self._send_adapter(version)
        difference = await self._difference_on_probe()
        self.check(f"the probe after sync {version}", difference)
        return difference

    async def _send_weights(self, version: int) -> None:
        # Twice their size: a tied head is written beside its embedding, and others need shared memory too.
        path = self._place(2 * self.actor.info["n_parameters"]).with_suffix(".safetensors")
        try:
            await self.actor.export(str(path))
            await self.engine.load_weights(str(path), version)
        finally:
            path.unlink(missing_ok=True)

    async def _send_adapter(self, version: int) -> None:
        folder = self._place(2 * self.actor.info["n_trained"])
        try:
            await self.actor.export_adapter(str(folder))
            await self.engine.load_adapter(str(folder), version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _place(self, n_numbers: int) -> Path:
        """A path for a file or folder of so many numbers that lives for one sync."""
        n_bytes = n_numbers * (4 if self.actor.info["dtype"] == "float32" else 2)
        return place(n_bytes) / f"envgym-{os.getpid()}-{id(self):x}"

    async def _difference_on_probe(self) -> float:
        token_ids = self.renderer.prompt(Observation(text=PROBE))
        # As if it were an action: tokens that do not count are not scored.
        [scored] = await self.actor.forward([TrainSample.of(Row([Segment("action", int_array(token_ids))]))])
        sampled = await self.engine.score(tuple(token_ids))
        differences = [abs(ours - theirs) for ours, theirs in zip(scored[1:].tolist(), sampled, strict=True)]
        return math.nan if any(map(math.isnan, differences)) else max(differences)  # `max` alone may lose a NaN

    def check(self, where: str, difference: float) -> None:
        """Raise `RunError` where sampler and trainer differ by more than the tolerance (or by NaN)."""
        if not difference <= self.tolerance:
            raise RunError(
                f"sampler and trainer disagree on {where}: log-probabilities differ by {difference:.2g}, more than "
                f"sync.tolerance={self.tolerance:g}. The engine does not hold the actor's weights, or computes "
                "differently (dtype, kernels)"
            )


def place(n_bytes: int) -> Path:
    """The folder for a file of `n_bytes` that lives for one weight sync: memory where it has room (a container's
    often has 64 MiB), else a temporary folder."""
    memory = Path("/dev/shm")
    fits = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > n_bytes
    return memory if fits else Path(tempfile.gettempdir())
