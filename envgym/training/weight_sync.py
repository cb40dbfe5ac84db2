"""Weight sync: the actor's weights are sent to the engines, checksums show that they arrived, and a probe that both
compute the same policy from them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from envgym.engines.pool import EngineClient, EnginePool
from envgym.errors import RunError, WorkerDied
from envgym.types import Row, Segment, int_array
from envgym.workers.group import WorkerGroup

from .turns import GpuTimeshare
from .weight_transfer import FileTransfer, Receipt, Transfer, check_arrival, refuse_replacement

MEAN_SHARE = 0.12
"""The largest mean difference on the probe, as a share of `sync.tolerance`, if that is set."""
FACTOR = 2.5
"""The largest difference after a sync, as a multiple of the one when both had read the same files: between those of
right syncs and of wrong ones (`benchmarks/sync_families.py`)."""
SMALLEST = {"float32": 1e-3, "16 bit": 0.01}
"""The difference, in nats, that is never too large: where it is small, the update changes it by larger factors."""
LARGEST = {"float32": 0.05, "16 bit": 0.5}
"""The difference, in nats, that is always too large, also when both have read the same files."""
PROBE = """\
A small shop sells apples at 3 for $2 and pears at 50 cents each. On Monday it sold 27 apples and 14 pears. How much
money did it take? Let us think step by step. 27 apples are 27 / 3 = 9 times three apples, so they cost 9 * 2 = 18
dollars. 14 pears cost 14 * 0.50 = 7 dollars. Together that is 18 + 7 = 25 dollars. The answer is 25.

The quick brown fox jumps over the lazy dog. Once upon a time there was a king who had three daughters, and the youngest
of them was so beautiful that the sun itself, which had seen so much, was astonished whenever it shone in her face.

def mean(numbers: list[float]) -> float:
    # Return the mean of the numbers.
    return sum(numbers) / len(numbers) if numbers else 0.0

The capital of France is Paris, the capital of Italy is Rome, and the capital of Japan is Tokyo. Water boils at 100
degrees Celsius and freezes at 0. The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29. Thank you very
much for your help! You are welcome. If there is anything else that I can do for you, please let me know.
"""
"""More than 200 tokens of every tokenizer."""
PROBE_TOKENS = 256
"""Tokens of the probe that are compared, where the context has room for them."""


@dataclass(slots=True)
class WeightSync:
    """Sends the actor's weights, or its LoRA adapter alone, to the engines, and compares the two.

    Their checksums tell whether the bytes arrived. Whether both then compute the same policy is relative: the
    difference of their log-probabilities of the probe (`policy_difference`) is compared with the one that this model
    has in these number formats when the engines have read the same files as the actor, before the first sync. If a run
    resumes, the engines have read older files, and the first sync after it gives the difference to compare with. A
    larger one stops the run if the first tokens that the engines sample confirm it.

    `tolerance`, if it is set, is the largest difference in log-probability, in nats, at which the two count as the same
    policy, in place of that comparison.
    """

    engine: EnginePool
    actor: WorkerGroup
    probe: tuple[int, ...]
    """Token ids of a text, of which the two are compared."""
    tolerance: float | None
    precision: str
    """The lower of the actor's and the engines' number formats: `float32` or `16 bit`."""
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
    reference: tuple[float, float] | None = None
    """The differences with which later ones are compared, in nats: of the policies, and the mean of the tokens."""
    alarm: str = ""
    """The large difference on the probe that the engines' next sampled tokens must confirm."""

    def __post_init__(self) -> None:
        self.engine.join = self.join

    async def __call__(self, version: int) -> float | None:
        """Load the actor's weights into the engines as policy `version`.

        Returns the largest difference in log-probability (nats) of any engine on the probe; None if every engine died:
        replacements get this version when they join. Raises `RunError` if the weights did not arrive, or if the engines
        compute another policy from them.
        """
        actor_logprobs = await self._probe_logprobs()
        if self.version is None and version == 0 and not self.base_is_quantized and self.tolerance is None:
            await self.timeshare.hand_over(None)
            for engine_logprobs in await self.engine.probe(self.probe):
                self._compare("the probe before the first sync", actor_logprobs, engine_logprobs)
            await self.timeshare.give_to_models()

        async def send() -> None:
            await self._send(self.engine, version, with_base=self.version is None)

        await self.timeshare.hand_over(send)
        self.version = version
        maximum = None
        for engine_logprobs in await self.engine.probe(self.probe):
            difference = self._compare(f"the probe after sync {version}", actor_logprobs, engine_logprobs)
            maximum = max(difference, maximum or 0.0)
        return maximum

    async def join(self, engine: EngineClient) -> None:
        """Give a replacement engine the weights of the current version; waits while the actor's are being updated."""
        async with self.weights_lock:
            if self.version is None:  # the first sync will include it
                return
            pool = EnginePool(refuse_replacement, [engine])
            async with self.timeshare.actor_on_device():
                actor_logprobs = await self._probe_logprobs()
                await self._send(pool, self.version, with_base=True)
            logprobs = await pool.probe(self.probe)
            if not logprobs:
                raise WorkerDied("it died while it was given the weights")
            self._compare("the probe of a restarted engine", actor_logprobs, logprobs[0])

    async def _send(self, engine: EnginePool, version: int, *, with_base: bool) -> None:
        adapter = self.actor.info.adapter
        if not adapter or (self.base_is_quantized and with_base):
            self.receipt = await (self.files if adapter else self.transfer).send(engine, version)
        if adapter:
            await self._send_adapter(engine, version)

    async def _send_adapter(self, engine: EnginePool, version: int) -> None:
        folder = await self.files.shared_path(engine, 8 * self.actor.info.n_trained)
        try:
            sent = (await self.actor.on_all(lambda rank: rank.export_adapter(str(folder))))[0]
            received = await engine.on_all(lambda engine: engine.load_adapter(str(folder), version))
            check_arrival("the adapter", version, sent, received)
        finally:
            await self.actor.on_first(lambda rank: rank.withdraw(str(folder)))

    async def _probe_logprobs(self) -> list[float]:
        """The actor's log-probabilities of the probe."""
        # As an action: workers compute no log-probabilities of other tokens.
        [scored] = await self.actor.forward([Row([Segment("action", int_array(self.probe))])])
        logprobs: list[float] = scored[1:].tolist()
        return logprobs

    def _compare(self, subject: str, actor: Sequence[float], engine: Sequence[float]) -> float:
        """Compare log-probabilities of the probe; returns the largest difference of a token.

        Raises `RunError` if the two are another policy: at once beyond `sync.tolerance` or `LARGEST`, else after the
        engines' first samples (`check_samples`)."""
        sizes = [abs(a - b) for a, b in zip(actor, engine, strict=True)]
        maximum, mean = max(sizes), fmean(sizes)
        if self.tolerance is not None:
            probe = f"{subject} of {len(sizes)} tokens (largest difference {maximum:.2g})"
            self._check(probe, mean, MEAN_SHARE * self.tolerance)  # first, since `max` may drop a NaN
            self._check(subject, maximum, self.tolerance)
            return maximum
        difference = policy_difference(actor, engine)
        self._check(subject, difference, LARGEST[self.precision])
        if self.reference is None:
            self.reference = difference, mean
        if difference > max(FACTOR * self.reference[0], SMALLEST[self.precision]):
            self.alarm = f"{subject} (by {difference:.2g} nats; {self.reference[0]:.2g} with the same files)"
        return maximum

    def check_samples(self, difference: float | None) -> None:
        """Compare the actor's log-probabilities of sampled tokens with the engines', before an optimizer step:
        `difference` is their mean difference in nats, None where they cannot be compared. Raises `RunError` if it is
        too large, or if an alarm of the probe cannot be refuted."""
        subject, bound = "this step's episodes", self.tolerance or LARGEST[self.precision]
        if self.alarm and self.reference is not None:
            subject, bound = f"{subject}, as on {self.alarm}", max(FACTOR * self.reference[1], SMALLEST[self.precision])
            difference = math.inf if difference is None else difference
        self._check(subject, difference or 0.0, bound)
        self.alarm = ""

    def _check(self, subject: str, difference: float, bound: float) -> None:
        """Raise `RunError` if sampler and trainer differ by more than `bound` nats, or by NaN."""
        if difference <= bound:
            return
        on_average, limit = " on average", f"{bound:.2g} nats"
        if self.tolerance is not None:
            share = "" if bound == self.tolerance else f"{MEAN_SHARE:.0%} of "
            on_average, limit = on_average if share else "", f"{share}sync.tolerance={self.tolerance:g}"
        raise RunError(
            f"sampler and trainer disagree on {subject}: log-probabilities differ by {difference:.2g}{on_average}, "
            f"more than {limit}. The bytes arrived (their checksums are equal): the engine assigns the weights to "
            "other places, or computes differently (dtype, kernels)"
        )


def policy_difference(actor: Sequence[float], engine: Sequence[float]) -> float:
    """The difference of two policies on a text, from their log-probabilities of its tokens, in nats: the mean absolute
    difference, each token weighted by its probability under the actor. It is about what tokens differ by that the
    policy samples; unlikely tokens, whose logits are rounded the most, count little. NaN if any is NaN."""
    top = max(actor)
    weights = [math.exp(logprob - top) for logprob in actor]
    differences = [abs(a - b) for a, b in zip(actor, engine, strict=True)]
    return sum(weight * difference for weight, difference in zip(weights, differences, strict=True)) / sum(weights)
