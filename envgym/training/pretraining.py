"""Pre-training text that the policy is trained on in addition to its own samples, so that it forgets less.

Source: the PPO-ptx objective of L. Ouyang et al., "Training language models to follow instructions with human feedback"
(2022), eq. 2. The learner's `pretrain_coef` weighs it.
"""

from __future__ import annotations

from pathlib import Path

from envgym.config.schema import PretrainConfig, TextSource
from envgym.env import TaskSet
from envgym.errors import DataError, did_you_mean
from envgym.hashing import derived_seed
from envgym.render import Renderer
from envgym.tasks import Interleaved
from envgym.tasks.rows import Rows, TextLines, open_rows
from envgym.tasks.task_set import TaskCursor
from envgym.types import Objective, Observation, Row, Segment, Task, int_array


class Pretraining:
    """Rows of pre-training text, `config.rows` per training step: every pass over the data has each document once,
    in a new order drawn by `seed`.

    Reads the whole file, and tokenises a document when its step needs it. Raises `DataError` for an unreadable file.
    """

    def __init__(self, config: PretrainConfig, renderer: Renderer, seed: int) -> None:
        self._config = config
        self._renderer = renderer
        sources = list(config.sources.values())
        files = [_Documents(source) for source in sources] or [_Documents(config)]
        for path, file in zip(config.paths, files, strict=True):
            if not file.size:
                raise DataError(f"pretrain.path: {path} holds no rows")
        weights = [source.weight for source in sources]
        documents = Interleaved(files, weights) if sources else files[0]
        self.cursor = TaskCursor(documents, derived_seed(seed, "pre-training"))

    async def next(self) -> list[Row]:
        """The rows of the next training step. All tokens but the first have a loss weight. Micro-batch keys and
        episodes are numbered from -1 downwards, so that they differ from those of other rows."""
        documents = await self.cursor.next(self._config.rows)
        return [self._row(str(document.prompt), -1 - index) for index, document in enumerate(documents)]

    def _row(self, text: str, number: int) -> Row:
        token_ids = self._renderer.prompt(Observation(text=text))
        end = self._renderer.tokenizer.eos_token_id
        if end is not None and token_ids[-1] != end:
            token_ids = [*token_ids, end]
        token_ids = token_ids[: self._config.max_tokens]  # a truncated document has no end token
        return Row(
            [Segment("action", int_array(token_ids))],
            Objective.CROSS_ENTROPY,
            microbatch_key=number,
            episode_index=number,
            group_index=number,
            is_on_policy=False,
        )


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
        row, location = self._rows[index], self._rows.location(index)
        if self._field not in row:
            raise DataError(
                f"{location}: the row has no field {self._field!r}, only {', '.join(row) or 'no fields'}: name the one "
                f"with the text by pretrain.text=FIELD.{did_you_mean(self._field, row)}"
            )
        text = row[self._field]
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{location}: field {self._field!r} holds no text")
        return Task(self._rows.name(index), prompt=text)
