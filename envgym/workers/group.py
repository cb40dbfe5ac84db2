"""The controller's handle of all ranks of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from envgym.errors import WorkerDied, WorkerError
from envgym.processes.runtime import CALL_SECONDS, Message, Result, Runtime, Worker, WorkerHandle, message_of
from envgym.types import Row

from .config import WorkerSpec
from .micro_batches import RankInfo, has_images, merge_metrics, micro_batches, sort_by_prefix

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray

    from .model import ModelWorker

Share = TypeVar("Share")
GRACE_SECONDS = 1.0
"""Time after a rank's failure in which other ranks may report a root cause: a rank that lost its peer often fails
before the controller sees how the peer died."""


class Ranks(Generic[Worker]):
    """The processes that hold a model together, each one rank of it. `role` is its name in messages."""

    def __init__(self, role: str, handles: Sequence[WorkerHandle[Worker]]) -> None:
        self.role = role
        self._handles = list(handles)
        self._closing: list[asyncio.Task[None]] = []

    def add(self, handle: WorkerHandle[Worker]) -> None:
        """Add a rank that has started."""
        self._handles.append(handle)

    def on_first(self, call: Callable[[Worker], Result]) -> Coroutine[Any, Any, Result]:
        """Run a method of rank 0 that needs no other rank; see `WorkerHandle.run`."""
        return self._handles[0].run(call)

    def on_all(self, call: Callable[[Worker], Result]) -> Coroutine[Any, Any, list[Result]]:
        """Run a method on every rank concurrently; results in the order of ranks. Fails as soon as one rank fails."""
        return self._on_each([message_of(call)] * len(self._handles))

    async def close(self) -> None:
        """End all ranks. Safe to call twice, and after one has died."""
        if not self._closing:
            self._close_soon()
        await asyncio.gather(*self._closing)

    async def _on_each(self, messages: Sequence[Message]) -> list[Any]:
        """Send every rank its message; results in the order of ranks.

        If one rank fails, the others may wait for it forever, so all ranks are ended and the group is unusable.
        """
        calls = [
            asyncio.ensure_future(handle.send(message)) for handle, message in zip(self._handles, messages, strict=True)
        ]
        try:
            finished, pending = await asyncio.wait(calls, timeout=CALL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            if not any(call.exception() for call in finished) and not pending:
                return [call.result() for call in calls]
            if finished and pending:
                finished |= (await asyncio.wait(pending, timeout=GRACE_SECONDS))[0]
            self._close_soon()
            errors = [error for call in finished if (error := call.exception())]
            if not errors:
                raise WorkerError(f"{self.role}: {messages[0][0]} did not end within {CALL_SECONDS:.0f} s")
            # A root cause (a death, a user's mistake) before a lost peer.
            raise min(errors, key=lambda error: isinstance(error, WorkerError) and not isinstance(error, WorkerDied))
        finally:
            for call in calls:
                call.cancel()

    def _close_soon(self) -> None:
        """Begin to end all ranks without waiting, so that the caller gets the error immediately."""
        self._closing += [asyncio.ensure_future(handle.close()) for handle in self._handles]


class WorkerGroup(Ranks["ModelWorker"]):
    """The ranks of one role of the learner."""

    info: RankInfo
    """Rank 0's, once the model is loaded."""

    def __init__(self, spec: WorkerSpec, handles: Sequence[WorkerHandle[ModelWorker]]) -> None:
        super().__init__(spec.role, handles)
        self.settings = spec.settings
        self._ranks_per_row = spec.settings.ranks_per_row
        self._budget = spec.settings.budget
        self._n_shares = len(handles) // self._ranks_per_row
        """Number of shares of the samples: ranks that split token sequences get the same share."""
        self._spec = spec
        self._without_adapter = False

    @classmethod
    async def start(cls, runtime: Runtime, spec: WorkerSpec, *, load_after: asyncio.Future[Any] | None = None) -> Self:
        """Start the ranks of `spec.settings`, and load the model in each.

        Models are loaded once `load_after` is done: an engine that starts on the same GPU measures the free memory.
        """
        starting = [
            asyncio.ensure_future(
                runtime.start(
                    "envgym.workers.model:ModelWorker", {"spec": spec, "rank": rank}, name=f"{spec.role}-{rank}"
                )
            )
            for rank in range(spec.settings.ranks)
        ]
        try:
            group = cls(spec, await asyncio.gather(*starting))
        except BaseException:
            for start in starting:
                start.cancel()
            for result in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(result, BaseException):
                    await result.close()
            raise
        try:
            if load_after is not None:
                await asyncio.wait({load_after})
            address = await group.on_first(lambda rank: rank.address()) if spec.settings.ranks > 1 else None
            group.info = (await group.on_all(lambda rank: rank.load(address)))[0]
        except BaseException:
            await group.close()
            raise
        return group

    def without_adapter(self, role: str) -> WorkerGroup:
        """The same workers as a frozen role: its `forward` disables the LoRA adapter, as before training. It is
        closed with this group."""
        view = WorkerGroup(replace(self._spec, role=role), self._handles)
        view.info = self.info
        view._without_adapter = True
        return view

    # -- log-prob passes and training -----------------------------------------------------------------------------

    async def forward(self, samples: Sequence[Row]) -> list[FloatArray]:
        """One float32 array [T] per sample, in order; see `ModelWorker.forward`."""
        if not samples:
            return []
        n_shares = self._n_shares
        if n_shares > 1 and self.info.layout_of(samples) == "shared":
            order = [index for index, _ in sort_by_prefix([sample.token_ids for sample in samples])]
            shares = [order[len(order) * k // n_shares : len(order) * (k + 1) // n_shares] for k in range(n_shares)]
        else:
            lengths = [len(sample.token_ids) for sample in samples]
            by_length = sorted(range(len(samples)), key=lengths.__getitem__, reverse=True)
            shares = [by_length[k::n_shares] for k in range(n_shares)]
        shares = [share or [0] for share in shares]  # with ZeRO 3 every rank must take part
        inputs = [sample.without_record(arrays={}) for sample in samples]
        with_images = has_images(samples)
        results = await self._on_shares(
            lambda rank, part: (
                rank.forward_base(part, with_images=with_images)
                if self._without_adapter
                else rank.forward(part, with_images=with_images)
            ),
            [[inputs[index] for index in share] for share in shares],
        )
        outputs: dict[int, FloatArray] = {}
        for share, result in zip(shares, results[:: self._ranks_per_row], strict=True):
            outputs.update(zip(share, result, strict=True))
        return [outputs[index] for index in range(len(samples))]

    async def accumulate(self, samples: Sequence[Row], normalizers: Mapping[str, float]) -> dict[str, float]:
        """Compute the gradient of one optimizer step, over all ranks; `step` applies it. Returns the learner's metrics
        and `mismatch/…`, and `tokens/shared_share`, the share of tokens that shared prefixes save, if they are used."""
        layout = self.info.layout_of(samples)
        shares = micro_batches(samples, self._budget, self._n_shares, layout=layout)
        self._accumulated = [[sample for batch in share for sample in batch] for share in shares]
        inputs = [[[sample.without_record() for sample in batch] for batch in share] for share in shares]
        with_images = has_images(samples)
        results = await self._on_shares(
            lambda rank, part: rank.accumulate(part, dict(normalizers), layout, with_images=with_images), inputs
        )
        return merge_metrics(
            # Ranks that split token sequences return the same sums, which must count once, but may differ in maxima.
            part if rank % self._ranks_per_row == 0 else {n: v for n, v in part.items() if n.endswith("/max")}
            for rank, part in enumerate(results)
        )

    async def accumulated_outputs(self) -> list[tuple[Row, FloatArray]]:
        """The samples of the last `accumulate`, each with the outputs [3, T] of `ModelLearning.accumulated_outputs`."""
        results = (await self.on_all(lambda rank: rank.accumulated_outputs()))[:: self._ranks_per_row]
        shares = zip(self._accumulated, results, strict=True)
        return [pair for samples, lines in shares for pair in zip(samples, lines, strict=True)]

    async def step(self, lr: float) -> dict[str, float]:
        """Take the optimizer step with the accumulated gradient. Returns its metrics; see `ModelWorker.step`."""
        return (await self.on_all(lambda rank: rank.step(lr)))[0]

    def _on_shares(
        self, call: Callable[[ModelWorker, Share], Result], shares: Sequence[Share]
    ) -> Coroutine[Any, Any, list[Result]]:
        """Run a method on every rank with its share; results in the order of ranks."""
        return self._on_each([message_of(call, share) for share in shares for _ in range(self._ranks_per_row)])
