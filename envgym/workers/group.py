"""The controller's end of one role: all ranks of a model behind one object."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from envgym.errors import WorkerDied, WorkerError
from envgym.learner import TrainSample
from envgym.processes.runtime import CALL_SECONDS, Runtime, WorkerHandle

from .metrics import merge
from .micro_batches import micro_batches
from .spec import RankInfo, WorkerSpec

if TYPE_CHECKING:
    from envgym.learner import FloatArray

GRACE_SECONDS = 1.0
"""Time for the others, after a rank failed, to fail with a better reason: a rank that lost its peer fails first, and
the peer's own end explains more."""


class WorkerGroup:
    """The ranks of one role. Every call runs on all of them at once, and fails as soon as one of them does."""

    info: RankInfo
    """Rank 0's, once the model is loaded."""

    def __init__(self, spec: WorkerSpec, handles: Sequence[WorkerHandle]) -> None:
        self.role = spec.role
        self.settings = spec.settings
        self._spec = spec
        self._handles = list(handles)
        self._closing: list[asyncio.Task[None]] = []
        self._forward = "forward"

    @classmethod
    async def start(cls, runtime: Runtime, spec: WorkerSpec, *, after: asyncio.Future[Any] | None = None) -> Self:
        """Start the ranks that `spec.settings` ask for, and load the model in each.

        On an accelerator models are loaded `after` what is given has ended: an engine that starts there measures how
        much memory is free.
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
            await _close_started(starting)
            raise
        try:
            if after is not None and await group._handles[0].call("device_type") != "cpu":
                await asyncio.wait({after})
            address = await group._handles[0].call("address") if spec.settings.ranks > 1 else None
            group.info = (await group.on_all("load", address))[0]
        except BaseException:
            await group.close()
            raise
        return group

    def without_adapter(self, role: str) -> WorkerGroup:
        """The same workers as another role, which answers as this one did before it learned: `forward` leaves the LoRA
        adapter out. It is closed with this one."""
        view = WorkerGroup(replace(self._spec, role=role), self._handles)
        view.info = self.info
        view._forward = "forward_base"
        return view

    # -- scoring and learning -----------------------------------------------------------------------------

    async def forward(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """One float32 array [T] a sample, in order; see `ModelWorker.forward`."""
        if not samples:
            return []
        by_length = sorted(range(len(samples)), key=lambda index: -len(samples[index]))
        n_shares = self._n_shares
        shares = [by_length[share::n_shares] or [0] for share in range(n_shares)]  # no rank may stay away (ZeRO-3)
        bare = [replace(sample, arrays={}) for sample in samples]
        results = await self._on_shares(self._forward, [([bare[index] for index in share],) for share in shares])
        scores: dict[int, FloatArray] = {}
        for share, result in zip(shares, results[:: self.settings.ranks_per_row], strict=True):
            scores.update(zip(share, result, strict=True))
        return [scores[index] for index in range(len(samples))]

    async def accumulate(self, samples: Sequence[TrainSample], denominators: Mapping[str, float]) -> dict[str, float]:
        """The gradient of one optimizer step, over all ranks. `step` applies it. Returns the learner's metrics and
        `mismatch/…`."""
        shares = micro_batches(samples, self.settings.budget, self._n_shares, packed=self.info.packed)
        self._accumulated = [[sample for batch in share for sample in batch] for share in shares]
        results = await self._on_shares("accumulate", [(share, dict(denominators)) for share in shares])
        return merge(
            # Ranks that share rows have the same sums to say of them, but may differ in what is the largest.
            part if rank % self.settings.ranks_per_row == 0 else {n: v for n, v in part.items() if n.endswith("/max")}
            for rank, part in enumerate(results)
        )

    async def learned_logprobs(self) -> list[tuple[TrainSample, FloatArray]]:
        """The samples that were accumulated last, each with the log-probabilities [T] that it was learned with."""
        results = (await self.on_all("learned_logprobs"))[:: self.settings.ranks_per_row]
        shares = zip(self._accumulated, results, strict=True)
        return [pair for samples, lines in shares for pair in zip(samples, lines, strict=True)]

    async def step(self, lr: float) -> dict[str, float]:
        """Take the optimizer step for what was accumulated. Returns what it logs; see `ModelWorker.step`."""
        results = await self.on_all("step", lr)
        step: dict[str, float] = results[0]
        return step

    # -- weights and state --------------------------------------------------------------------------------

    async def on_first(self, method: str, *args: Any) -> Any:
        """Call a method of rank 0's `ModelWorker` that concerns no other."""
        return await self._handles[0].call(method, *args)

    async def on_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's `ModelWorker`; results in the order of ranks."""
        return await self._on_each(method, [args] * len(self._handles))

    async def export_adapter(self, folder: str) -> None:
        """Write the LoRA adapter as a folder in peft's form, on rank 0's machine."""
        await self.on_all("export_adapter", folder)

    async def save(self, folder: str, described: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face model folder, without the tokenizer, an adapter merged into it. `described` are further
        entries of its config."""
        await self.on_all("save", folder, dict(described or {}))

    async def save_average(self, folder: str) -> None:
        """Write the moving average of the weights as a Hugging Face model folder, without the tokenizer."""
        await self.on_all("save_average", folder)

    async def save_state(self, folder: str, *, waits: bool = True) -> None:
        """Write weights, optimizer and random states, exactly, as they are now. Without `waits` it is only begun, and
        ends with `finish_save`: the ranks may learn on meanwhile."""
        await self._on_each("save_state", [(folder,)] * len(self._handles), waits=waits)

    async def load_state(self, folder: str) -> None:
        """Go on from `save_state`."""
        await self.on_all("load_state", folder)

    async def close(self) -> None:
        """End all ranks. Safe to call twice, and after one has died."""
        if not self._closing:
            self._close_soon()
        await asyncio.gather(*self._closing)

    # -- calling ------------------------------------------------------------------------------------------

    @property
    def _n_shares(self) -> int:
        """Number of shares that rows are dealt in: ranks that work on the same rows get the same."""
        return len(self._handles) // self.settings.ranks_per_row

    async def _on_shares(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every rank with the arguments of its share; results in the order of ranks."""
        return await self._on_each(method, [args for args in arguments for _ in range(self.settings.ranks_per_row)])

    async def _on_each(self, method: str, arguments: Sequence[tuple[Any, ...]], **same: Any) -> list[Any]:
        """Call every rank with its own arguments; results in the order of ranks.

        Where one fails the others may wait for it for ever, so all are ended and the group is of no more use.
        """
        calls = [
            asyncio.ensure_future(handle.call(method, *args, **same))
            for handle, args in zip(self._handles, arguments, strict=True)
        ]
        try:
            done, pending = await asyncio.wait(calls, timeout=CALL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            if not any(call.exception() for call in done) and not pending:
                return [call.result() for call in calls]
            if done and pending:
                done |= (await asyncio.wait(pending, timeout=GRACE_SECONDS))[0]
            self._close_soon()
            errors = [error for call in done if (error := call.exception())]
            if not errors:
                raise WorkerError(f"{self.role}: {method} did not end within {CALL_SECONDS:.0f} s")
            raise min(errors, key=_vagueness)
        finally:
            for call in calls:
                call.cancel()

    def _close_soon(self) -> None:
        """Begin to end all ranks, without waiting for it: whoever waits for a call is to get its error now."""
        self._closing += [asyncio.ensure_future(handle.close()) for handle in self._handles]


def _vagueness(error: BaseException) -> int:
    """Sorts what several ranks say of one failure: a death or a user's mistake explains more than a lost peer."""
    if isinstance(error, WorkerDied) or not isinstance(error, WorkerError):
        return 0
    return 1


async def _close_started(starting: Sequence[asyncio.Future[WorkerHandle]]) -> None:
    """One of several workers did not start: end the others, also those still on their way."""
    for start in starting:
        start.cancel()
    for result in await asyncio.gather(*starting, return_exceptions=True):
        if not isinstance(result, BaseException):
            await result.close()
