"""The process that holds a reward model. Only its constructor imports torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, needs, printable_line
from envgym.hub import find_on_hub
from envgym.limits import limits
from envgym.models import check_no_file
from envgym.processes.gpus import check_visible_gpu
from envgym.render import TextRenderer, load_tokenizer, make_renderer
from envgym.render.chat import RENDERING
from envgym.render.spelling import mark_after_prompt
from envgym.run_folder import policy_of_run
from envgym.types import Message, Observation, as_messages
from envgym.workers.config import WorkersConfig, number_format

from .client import Scored, Text
from .declarations import RewardModel


class RewardWorker:
    """A sequence-classification model with one output, which scores conversations.

        worker = RewardWorker(RewardModel(model="path/or/hub-id"))
        [(reward, tokens, cut)] = worker.score(["question and answer"])

    The reward is read where transformers reads it: at the last token of the rendered chat template that is not the
    padding token. A model whose config has `reward_at: end_of_turn`, as models trained with envgym do, reads the
    conversation's training sequence: the reward is that of its last token, the end of the turn, without any text that
    a template writes after it. Padding goes to the right and is masked, so a reward depends on the rest
    of its batch by rounding alone; `deterministic` avoids that with batches of one.
    """

    def __init__(self, declared: RewardModel, *, deterministic: bool = False, rank: int = 0) -> None:
        with needs("torch", "train", "a reward model"):
            import transformers

            from envgym.workers.network import be_deterministic
        if deterministic:
            be_deterministic()
        self._device = _freest_device()
        check_visible_gpu(self._device.type)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._name = _find_model(declared.model)
        self._rank, self._ranks, self._offloads = rank, declared.ranks, declared.offload
        self._batch_size = 1 if deterministic else declared.batch_size
        self._truncates = declared.too_long == "cut"
        self._dtype = number_format(declared.dtype, on_cpu=self._device.type == "cpu")
        loaded = _load(self._name, self._dtype) if rank == 0 else _allocate(self._name, self._dtype)
        self._config = loaded.config.get_text_config()
        self._config.use_cache = False
        self._model = loaded.eval()
        if self._ranks == 1 and not declared.offload:
            self._model.to(self._device)
        elif self._ranks == 1:
            self.join(None)
        self._tokenizer = load_tokenizer(self._name)
        as_rows = getattr(loaded.config, "reward_at", None) == "end_of_turn" or declared.render == "raw"
        self._renderer = make_renderer(declared.render, self._tokenizer) if as_rows else None
        self._encoder = self._renderer or TextRenderer(self._tokenizer)
        self._max_length = declared.max_length or _limit(self._config, self._tokenizer)
        self._mean, self._std = _statistics(loaded.config, self._name) if declared.normalise else (0.0, 1.0)

    def address(self) -> str:
        """A free `host:port` on this rank's machine, at which the ranks can meet."""
        from envgym.workers.zero import free_address

        return free_address()

    def join(self, address: str | None) -> None:
        """Distribute the weights over the ranks, by DeepSpeed's ZeRO 3. They meet at `address`; None: a single rank."""
        from envgym.workers import zero

        zero.join_process_group(address, self._rank, self._ranks, self._device)
        settings = WorkersConfig(ranks=self._ranks, zero_stage=3, offload_parameters=self._offloads)
        json = zero.config(settings, None, self._model.dtype, self._device)
        self._model = zero.engine(self._model, json, self._device)

    def score(self, texts: Sequence[Text]) -> list[Scored]:
        """The `Scored` of each conversation, in order.

        The reward is None for an empty conversation, for one that is too long where truncation is not allowed, and for
        those that another rank scores. All ranks call their models equally often, since each needs the others' weights.
        """
        sequences = [self._try_to_encode(text) for text in texts]
        results: list[Scored] = [ids if isinstance(ids, str) else (None, len(ids), False) for ids in sequences]
        entries = []
        for index, ids in enumerate(sequences):
            too_long = len(ids) > self._max_length
            if not isinstance(ids, str) and ids and (self._truncates or not too_long):
                entries.append((index, self._truncate(ids) if too_long else ids, too_long))
        entries.sort(key=lambda entry: len(entry[1]))  # stable: equal lengths keep their order
        batches = [entries[start : start + self._batch_size] for start in range(0, len(entries), self._batch_size)]
        for first in range(0, len(batches), self._ranks):
            is_spare = first + self._rank >= len(batches)
            batch = batches[first if is_spare else first + self._rank]
            rewards = self._forward([ids for _, ids, _ in batch])
            for (index, _, cut), reward in zip(batch, rewards, strict=True) if not is_spare else ():
                results[index] = ((reward - self._mean) / self._std, len(sequences[index]), cut)
        return results

    def _try_to_encode(self, text: Text) -> list[int] | str:
        """The token ids of a text, or the reason why it has none that the model takes: an exception would end the model
        for all others."""
        try:
            ids = self._encode(text)
        except ConfigError:
            raise
        except Exception as error:  # a template's code can raise any error
            return printable_line(f"{type(error).__name__}: {error}")
        size = self._config.vocab_size
        return f"token {max(ids)} is not one of the model's {size}" if ids and max(ids) >= size else ids

    def _encode(self, text: Text) -> list[int]:
        """The token ids of a conversation, text, or answer in steps (a dict); empty for an empty text."""
        tokenizer = self._tokenizer
        if isinstance(text, dict):
            return self._encode_steps(as_messages(text["before"]), text["steps"], is_last=text["is_last"])
        if not isinstance(text, str):
            messages = mark_after_prompt(as_messages(text))
            if self._renderer is not None and messages and messages[-1].role == "assistant":
                *prompt, answer = messages
                dialogue = self._renderer.dialogue()
                return [*dialogue.start(Observation(messages=tuple(prompt))), *dialogue.add_demonstration(answer)]
            dicts = [message.as_dict() for message in self._encoder.escape(messages)]
            if tokenizer.chat_template:
                with limits(*RENDERING):
                    rendered = tokenizer.apply_chat_template(dicts, tokenize=False)
                return self._encoder.encode(rendered)  # templates write special tokens themselves
            text = as_text(dicts)
        # Text that a template has rendered already has its first token.
        has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = self._encoder.encode(text, add_special_tokens=not has_bos)
        if tokenizer.eos_token_id is None:
            return ids
        # Models trained on plain text read their reward at one end-of-sequence token, and encoders end with it too.
        while ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            ids.pop()
        return [*ids, tokenizer.eos_token_id] if ids else []

    def _encode_steps(self, prompt: Sequence[Message], steps: Sequence[str], *, is_last: bool) -> list[int]:
        """An answer in steps, in the token sequence that process reward models are trained on."""
        if self._renderer is None:
            raise ConfigError(f"{self._name} is not a process reward model trained with envgym")
        dialogue = self._renderer.dialogue()
        ids = list(dialogue.start(Observation(messages=tuple(prompt))))
        for number, step in enumerate(map(self._renderer.speller.escape_policy_text, steps), 1):
            if is_last and number == len(steps):
                return [*ids, *dialogue.add_demonstration(step)]
            ids += dialogue.add_observation(Observation(text=step)).token_ids
        return ids

    def _truncate(self, ids: list[int]) -> list[int]:
        """The end of a sequence, where the reward is read, after its special first token if it has one."""
        if ids[0] in (self._tokenizer.bos_token_id, self._tokenizer.cls_token_id):
            return [ids[0], *ids[len(ids) - self._max_length + 1 :]]
        return ids[len(ids) - self._max_length :]

    def _forward(self, batch: Sequence[list[int]]) -> list[float]:
        """The rewards of token sequences, not normalized."""
        import torch

        padding = self._config.pad_token_id if self._renderer is None else None
        if padding is None:
            # transformers treats every trailing padding token as padding. A model without one, or trained with envgym,
            # reads the very last token, so pad with a token that occurs in none of these sequences.
            used_ids = {token for ids in batch for token in ids}
            padding = next(token for token in range(len(used_ids) + 1) if token not in used_ids)
        length = max(map(len, batch))
        ids = torch.tensor([sequence + [padding] * (length - len(sequence)) for sequence in batch])
        mask = torch.tensor([[1] * len(sequence) + [0] * (length - len(sequence)) for sequence in batch])
        saved_padding = self._config.pad_token_id
        self._config.pad_token_id = padding
        try:
            with torch.no_grad():  # DeepSpeed, which fetches weights, cannot do so in inference mode
                logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        finally:
            self._config.pad_token_id = saved_padding
        return [float(reward) for reward in logits[:, 0].float().cpu()]


def as_text(messages: Sequence[dict[str, Any]]) -> str:
    """A conversation for models without a chat template: the last message follows directly on the others."""
    texts = [str(message["content"]) for message in messages]
    return "\n".join(texts[:-1]) + texts[-1]


def _find_model(name: str) -> str:
    """The model's folder, or its name on the hub, for libraries to load. Raises `ConfigError` if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(policy_of_run(path))
    check_no_file(name)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(f"there is no reward model folder {name} (and on the hub a name is of the form ORG/NAME)")
    return find_on_hub(name)


def _load(name: str, dtype: str) -> Any:
    """The model. Raises `ConfigError` where it does not load or is not a reward model."""
    import torch
    import transformers

    try:
        model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"reward model {name} does not load: {reason}") from None
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{name} is not a reward model: it has no weights for {missing[0]} (a language model, or one whose reward "
            "head has another name, is no sequence-classification model)"
        )
    if model.config.num_labels != 1:
        raise ConfigError(f"{name} is not a reward model: it gives {model.config.num_labels} numbers, not one")
    return model


def _allocate(name: str, dtype: str) -> Any:
    """The model without its weights, which rank 0 sends."""
    import torch

    from envgym.workers.network import load_model

    return load_model(name, "scalar", getattr(torch, dtype), attention=None, uninitialized=True)


def _limit(config: Any, tokenizer: Any) -> int:
    """The maximum sequence length of model and tokenizer, in tokens."""
    positions = getattr(config, "max_position_embeddings", None)
    return min(limit for limit in (positions, tokenizer.model_max_length, 2**20) if limit and limit > 0)


def _statistics(config: Any, name: str) -> tuple[float, float]:
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    if not isinstance(mean, int | float) or not isinstance(std, int | float) or not std > 0:
        raise ConfigError(f"normalise: the config of {name} holds no mean and std of its rewards; set normalise=false")
    return float(mean), float(std)


def _freest_device() -> Any:
    """The accelerator with the most free memory: the engine and trained models use them too."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", max(range(torch.cuda.device_count()), key=lambda gpu: torch.cuda.mem_get_info(gpu)[0]))
