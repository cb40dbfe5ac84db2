"""A worker's model and state in files: the run's result, and checkpoints to resume from."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from envgym.errors import RunError
from envgym.models.rounding import ENOUGH
from envgym.models.weights_file import checksum, save_model

from . import checkpoint, reshard, zero
from .config import WorkersConfig, number_format
from .export import WeightExport, averaged_parameters

if TYPE_CHECKING:
    from envgym.learner import Learner

    from .config import WorkerSpec
    from .optimizer import MovingAverage


class ModelState(WeightExport):
    """Files of a `ModelWorker`. All calls are collective."""

    spec: WorkerSpec
    settings: WorkersConfig
    trained: bool
    device: torch.device
    learner: Learner | None
    engine: Any
    average: MovingAverage | None
    _writer: checkpoint.Writer

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights."""
        dtype: torch.dtype = getattr(torch, number_format(self.settings.dtype, on_cpu=self.device.type == "cpu"))
        return dtype

    def export_adapter(self, folder: str) -> int:
        """Write the adapter as a folder in peft's format, on rank 0; returns the checksum of its tensors."""
        assert self.adapter is not None
        tensors = dict(self.adapter.tensors())
        if self.rank == 0:
            self.adapter.write(folder, tensors)
        return checksum(tensors)

    def save(self, folder: str, config_extras: Mapping[str, Any] | None = None) -> str:
        """Write a Hugging Face model folder (without the tokenizer), with an adapter merged into it. Rank 0 writes.

        `config_extras` are further entries of its config. Returns a note for the user if an adapter is merged in
        float32, because the weights' own number format would keep too little of it.
        """
        dtype, words = self._merged_format()
        tensors = dict(self._parameters(merged=dtype))
        if self.rank == 0:
            self.network.model.config.update(dict(config_extras or {}))
            self._write(folder, tensors, dtype)
        return words

    def _merged_format(self) -> tuple[torch.dtype, str]:
        """The number format in which an adapter is merged, and the note if it is not the weights' own. A collective
        call."""
        if self.adapter is None or self.dtype == torch.float32:
            return self.dtype, ""
        change = self.adapter.merged_change()
        if change.share >= ENOUGH:
            return self.dtype, ""
        return torch.float32, f"the adapter is merged in float32, since {change.in_words}"

    def _write(self, folder: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Write a model folder with `tensors`, which are in `dtype`."""
        save_model(self.network.model, folder, state_dict=dict(tensors))
        config = Path(folder, "config.json")
        content = json.loads(config.read_text(encoding="utf-8"))  # of the model, which may have another format
        content["dtype"] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def save_average(self, folder: str) -> None:
        """Write the moving average of the weights (`learner.ema_decay`) as a Hugging Face model folder, in the model's
        own number format, or that of a merged adapter. Rank 0 writes."""
        assert self.average is not None
        dtype, _ = self._merged_format()
        parameters = averaged_parameters(self.network.model, self.adapter, self.average, self.device, dtype)
        tensors = {name: tensor.cpu() for name, tensor in parameters if self.rank == 0}
        if self.rank == 0:
            self._write(folder, tensors, dtype)

    def save_state(self, folder: str, *, blocking: bool = True) -> None:
        """Write the exact weights, optimizer and random states. Every rank writes its own part. Unless `blocking`,
        copies are written in the background, until `finish_save`."""
        self._writer.blocking = blocking
        without_base = self.adapter is not None  # an adapter's base is loaded from its model folder
        self.engine.save_checkpoint(folder, tag="deepspeed", save_latest=False, exclude_frozen_parameters=without_base)
        state: dict[str, Any] = {**self._layout, "random": checkpoint.random_states()}
        if self.average is not None:
            state["average"] = self.average.state()
        self._writer.write(Path(folder, f"rank-{self.rank}.pt"), state)

    async def finish_save(self) -> None:
        """Wait until `save_state` is on disk. Raises `RunError` if a write failed."""
        await self._writer.finish()

    @property
    def _layout(self) -> dict[str, int]:
        """The settings that determine how a checkpoint is split into files."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "world_size": self.settings.ranks,
            "zero_stage": self.settings.effective_zero_stage(dtype, trained=self.trained),
            "tensor_parallel": self.settings.tensor_parallel,
        }

    def load_state(self, folder: str) -> None:
        """Restore the state of `save_state`, bit for bit if ranks and ZeRO stage are the same. Raises `RunError` if it
        is missing, or cannot be split over these ranks."""
        state = checkpoint.read_rank(folder, self.spec.role, 0)
        if any(state.get(name, value) != value for name, value in self._layout.items()):
            self._load_resharded(folder, state)
            self._set_optimizer_settings()
            return
        state = checkpoint.read_rank(folder, self.spec.role, self.rank)
        self.engine.load_checkpoint(folder, tag="deepspeed", load_module_strict=self.adapter is None)
        if self.average is not None:
            if "average" not in state:
                raise RunError(f"the state in {folder} has no moving average: set learner.ema_decay=0")
            self.average.load_state(state["average"])
        checkpoint.set_random_states(state["random"])
        self._set_optimizer_settings()

    def _set_optimizer_settings(self) -> None:
        """Give the optimizer its configured settings: DeepSpeed has restored those of the run that saved the state."""
        if self.learner is not None and "optimizer" not in self.settings.deepspeed:
            zero.set_optimizer_settings(self.engine, self.learner.config)

    def _load_resharded(self, folder: str, state: Mapping[str, Any]) -> None:
        """Restore the state of another number of ranks or ZeRO stage, up to rounding, with new random states."""
        assert self.learner is not None
        reshard.check(folder, state, self.settings, self.learner.config)
        reshard.load(self.engine, Path(folder, "deepspeed"))
        self._seed_generators()

    def _seed_generators(self) -> None:
        random.seed(self.spec.seed)
        np.random.seed(self.spec.seed % 2**32)
        torch.manual_seed(self.spec.seed)
