"""Base of the renderers: loading the tokenizer, exact encoding and decoding in context, the tokens that end a turn."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from envgym.errors import ConfigError, InvalidStep, needs
from envgym.types import Message, Observation

from .spelling import BREAK, IN_APIS, Speller, rewritten

if TYPE_CHECKING:
    from .dialogue import Dialogue


class Renderer(ABC):
    """Turns what an environment says into the tokens a policy reads.

    One renderer serves every episode of a run; `dialogue` is one episode's conversation. `stop_token_ids` are the
    ids that end the policy's turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.added_tokens: dict[int, str] = {
            index: str(token.content) for index, token in tokenizer.added_tokens_decoder.items()
        }
        """Tokens that the tokenizer finds in any text before it looks at the rest (special ones among them), by id."""
        self.speller = Speller(tokenizer.added_tokens_decoder)
        decodes = getattr(type(tokenizer), "_decode", None)
        # Where transformers only hands ids on, they are given straight to what decodes: it looks at each of them first,
        # which takes longer than decoding. (Some classes decode in a way of their own.)
        hands_on = getattr(decodes, "__module__", "") == "transformers.tokenization_utils_tokenizers"
        self._backend = tokenizer.backend_tokenizer if hands_on else None
        self._special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._opening: tuple[Observation | None, str, list[int]] = (None, "", [])
        self.stop_token_ids: tuple[int, ...] = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)

    others_answer = True
    """Messages after the first observation hold others' words, whatever they say of themselves."""

    @abstractmethod
    def dialogue(self) -> Dialogue:
        """A new conversation."""

    def prompt(self, observation: Observation) -> list[int]:
        """Token ids of an episode's first observation, up to where the policy's turn begins."""
        return self.dialogue().begin(observation)

    def opening(self, observation: Observation) -> tuple[str, list[int]]:
        """An episode's first observation as text and as token ids."""
        # The members of a group start one after the other, from the same observation.
        if self._opening[0] != observation:
            raw = observation.text
            text = self._open(observation) if raw is None else raw
            token_ids = self.encode(text)
            bos = self.tokenizer.bos_token_id
            if (self._bos_before_messages if raw is None else self._bos_before_text) and token_ids[:1] != [bos]:
                token_ids.insert(0, bos)
            self._opening = (observation, text, token_ids)
        return self._opening[1:]

    @abstractmethod
    def _open(self, observation: Observation) -> str:
        """First messages, with the tools on offer, up to where the policy's turn begins."""

    @property
    def _bos_before_messages(self) -> bool:
        """True where a beginning-of-sequence token is put before the first messages where they do not begin with
        one."""
        return False

    @cached_property
    def _bos_before_text(self) -> bool:
        """True where one is put before raw text, as the tokenizer does itself."""
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer.encode("a")[0] == bos

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a policy's turn without special tokens, as an environment gets it."""
        return self._decode(token_ids, skip_special_tokens=True)

    def ends_turn(self, token_id: int) -> bool:
        """True for a token that, standing last in a turn, ended it and is no part of its text. An engine may stop
        at more special tokens than ours."""
        return token_id in self.stop_token_ids or token_id in self._special

    def spelled(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """The messages as they are rendered: with a `BREAK` in each special token that others have spelled out."""
        speller = self.speller
        return tuple(rewritten(m, speller.of_policy if m.role == "assistant" else speller.of_all) for m in messages)

    def spells(self, text: str) -> bool:
        """True where an answer of the policy spells out a special token."""
        return self.speller.of_policy(text) != text

    # -- text that stands in the middle of a conversation -------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text that begins a sequence. Special tokens that stand in it are those tokens, but for those
        with a `BREAK`."""
        if BREAK in text:
            # The surest is a space. It is kept where characters would become the token all the same: where it is in the
            # model's vocabulary too, or where the tokenizer looks for it only after it has rewritten the text.
            safe = self.encode(text.replace(BREAK, " "), add_special_tokens=add_special_tokens)
            ids = self._breaking.encode(text, add_special_tokens=add_special_tokens).ids if self._breaking else safe
            return ids if self._added_among(ids) == self._added_among(safe) else safe
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except TypeError:
            raise InvalidStep(
                "an observation's text is not valid Unicode (it holds half of a surrogate pair): replace those"
            ) from None

    def encode_after(self, last: int | None, text: str) -> list[int]:
        """Token ids of a text that follows token `last`.

        Some tokenizers write a text's first word in another way than words that follow (with a space that nobody
        wrote), so the text is encoded behind something, which is then cut off.
        """
        if not text:
            return []
        if last in self.added_tokens:
            # The tokenizer splits there, so these are the ids of the whole.
            ids = self.encode(self.added_tokens[last] + text)
            if ids[0] == last:
                return ids[1:]
        cuts: list[list[int]] = []
        for before, anchor in self._anchors.items():
            ids = self.encode(before + text)
            if ids[: len(anchor)] != anchor:
                continue
            cuts.append(ids[len(anchor) :])
            if self._decode(ids) == self._decode(anchor) + text.replace(BREAK, ""):
                return cuts[-1]
        return cuts[0] if cuts else self.encode(text)

    def decode_after(self, token_ids: Sequence[int]) -> str:
        """The text that ids add to a conversation, special tokens included: also a space before the first word, which
        decoding alone takes away with some tokenizers. What is no text is U+FFFD."""
        anchor, before = self._anchor
        whole = self._decode([*anchor, *token_ids])
        return whole[len(before) :] if whole.startswith(before) else self._decode(token_ids)

    def decode_spelled(self, token_ids: Sequence[int]) -> str:
        """The same, with a `BREAK` in what a policy spelled out by other tokens than those added."""
        text = self.decode_after(token_ids)
        broken = self.speller.of_policy(text)
        if broken == text:
            return text
        runs = [(added, self.decode_after([*run])) for added, run in groupby(token_ids, self.added_tokens.__contains__)]
        pieces = [run if added else self.speller.of_policy(run) for added, run in runs]
        return "".join(pieces) if "".join(run for _, run in runs) == text else broken

    @cached_property
    def _breaking(self) -> Any:
        """A copy of what encodes that takes `BREAK`s out once it has looked for added tokens; None where there is no
        such."""
        from tokenizers import normalizers

        copied = deepcopy(getattr(self.tokenizer, "backend_tokenizer", None))
        if copied is not None:
            own = [copied.normalizer] if copied.normalizer is not None else []
            copied.normalizer = normalizers.Sequence([normalizers.Replace(BREAK, ""), *own])
        return copied

    def _added_among(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in self.added_tokens]

    @cached_property
    def _anchors(self) -> dict[str, list[int]]:
        """Texts behind which another can be encoded, with their ids: a special token, or a line break where there is
        none or the tokenizer puts a space after special tokens too."""
        special = [token for token in (self.tokenizer.eos_token, self.tokenizer.bos_token) if token is not None]
        return {before: self.encode(before) for before in [*special, "\n"]}

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ids that ids can be decoded behind, and what they are decoded to by themselves."""
        ids = next(iter(self._anchors.values()))
        return ids, self._decode(ids)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)


class NoRenderer(Renderer):
    """The renderer of agents whose engine takes messages as they are: there are no tokens to render."""

    def __init__(self) -> None:
        self.stop_token_ids = ()

    def spells(self, text: str) -> bool:
        return IN_APIS.search(text) is not None

    def dialogue(self) -> NoReturn:
        raise ConfigError("this agent renders tokens, which an API as the engine (engine.kind=openai) does not take")

    def _open(self, observation: Observation) -> NoReturn:
        self.dialogue()


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model folder or hub id. Raises `ConfigError` where there is none."""
    with needs("transformers", "train", "rendering prompts"):
        # With the class that most tokenizers have, torch and all of transformers' models need not be imported.
        if _is_common(Path(model)):
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry; the line below says all
    try:
        return Tokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]  # its first line may end with "one of:"
        raise ConfigError(f"model {model}: its tokenizer cannot be loaded ({reason})") from None


def _is_common(folder: Path) -> bool:
    """True where a folder's tokenizer is of transformers' common class, which `tokenizer.json` describes."""
    try:
        saved = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(saved, dict) or "auto_map" in saved or not (folder / "tokenizer.json").is_file():
        return False
    return saved.get("tokenizer_class") == "TokenizersBackend"
