"""Text that is taught as it stands beside what a policy samples, so that learning by reward forgets less.

Source: the PPO-ptx objective of L. Ouyang et al., "Training language models to follow instructions with human feedback"
(2022), eq. 2. The learner weighs it (`pretrain_coef`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envgym.config.schema import PretrainConfig, TextSource
from envgym.env import TaskSet
from envgym.errors import DataError, did_you_mean
from envgym.hashing import derived_seed
from envgym.learner import TrainSample
from envgym.render import Renderer
from envgym.tasks import Interleaved
from envgym.tasks.cursor import TaskCursor
from envgym.tasks.rows import Rows, TextLines, open_rows
from envgym.types import Objective, Observation, Task


class Pretraining:
    """Samples of pre-training text, `config.rows` a step: each document once in every pass over the data, each pass in
    an order of its own, drawn by `seed`.

    Reads the whole file (documents are tokenised when they are due). Raises `DataError` for one that cannot be read.
    """

    def __init__(self, config: PretrainConfig, renderer: Renderer, seed: int) -> None:
        self._config = config
        self._renderer = renderer
        sources = list(config.sources.values())
        parts = [_Documents(source) for source in sources] or [_Documents(config)]
        for path, part in zip(config.paths, parts, strict=True):
            if not part.size:
                raise DataError(f"pretrain.path: {path} holds no rows")
        weights = [source.weight for source in sources]
        documents = Interleaved(parts, weights) if sources else parts[0]
        self._cursor = TaskCursor(documents, derived_seed(seed, "pre-training"))

    async def next(self) -> list[TrainSample]:
        """The step's samples: every token counts but the first. Their units and episodes are numbered from -1
        downwards, so that they meet nobody else's."""
        documents = await self._cursor.next(self._config.rows)
        return [self._sample(str(document.prompt), -1 - index) for index, document in enumerate(documents)]

    def _sample(self, text: str, number: int) -> TrainSample:
        import numpy as np

        token_ids = self._renderer.prompt(Observation(text=text))
        end = self._renderer.tokenizer.eos_token_id
        if end is not None and token_ids[-1] != end:
            token_ids = [*token_ids, end]
        token_ids = token_ids[: self._config.max_tokens]  # one that is cut is not taught to end there
        weights = np.ones(len(token_ids), np.float32)
        weights[0] = 0.0  # nothing predicts the first token
        return TrainSample(
            token_ids=np.asarray(token_ids, np.int32),
            loss_weights=weights,
            old_logprobs=np.full(len(token_ids), np.nan, np.float32),
            objective=Objective.CROSS_ENTROPY,
            microbatch_key=number,
            episode_index=number,
            group_index=number,
            is_on_policy=False,
        )

    def state(self) -> dict[str, Any]:
        return self._cursor.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._cursor.load_state(state)


def spread(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Samples dealt out to `parts` optimizer steps, as evenly as their number allows."""
    return [list(samples[index::parts]) for index in range(parts)]


class _Documents(TaskSet):
    """The documents of a file or folder."""

    def __init__(self, config: TextSource) -> None:
        path = Path(str(config.path))
        self._rows: Rows = TextLines(path, path.stem, None) if path.suffix == ".txt" else open_rows(path, config.split)
        self._field = config.text

    @property
    def size(self) -> int:
        return len(self._rows)

    async def get(self, index: int) -> Task:
        row, where = self._rows[index], self._rows.where(index)
        if self._field not in row:
            raise DataError(
                f"{where}: the row has no field {self._field!r}, only {', '.join(row) or 'no fields'}: say which holds "
                f"the text with pretrain.text=FIELD.{did_you_mean(self._field, row)}"
            )
        text = row[self._field]
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: field {self._field!r} holds no text")
        return Task(self._rows.name(index), prompt=text)
