"""Base classes of the renderers, which encode and decode exactly, in context, and of their dialogues, one episode's
conversation as tokens; and the loading of the tokenizer."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, count, groupby
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from envgym.disk import regular_file
from envgym.errors import ConfigError, InvalidStep, needs
from envgym.hub import optional_file
from envgym.types import (
    ImagePart,
    Message,
    Observation,
    PlacedImage,
    ToolCall,
    ToolSpec,
    observed_messages,
    refuse_images,
)
from envgym.types.messages import images_in

from .images import Placeholders
from .spelling import BREAK, IN_APIS, Speller, rewrite
from .tool_calls import Reading

MAX_GROWTH = 1000
"""Maximum factor by which a tokenizer may lengthen a text. Usual ones lengthen it up to 20 times, by Unicode's longest
normalization; those that write white space as words up to 100 times."""


class Renderer(ABC):
    """Converts an environment's observations to the policy's tokens.

    One renderer serves every episode of a run; `dialogue` creates one episode's conversation. `stop_token_ids` are
    the ids that end the policy's turn.
    """

    def __init__(self, tokenizer: Any, image_size: Mapping[str, int] | None = None) -> None:
        self.tokenizer = tokenizer
        self.placeholders = Placeholders(tokenizer.name_or_path or "the model", image_size)
        decoder = tokenizer.added_tokens_decoder
        self.added_tokens: dict[int, str] = {index: str(token.content) for index, token in decoder.items()}
        """Tokens that the tokenizer finds in any text before it splits the rest (special ones among them), by id."""
        self.speller = Speller(decoder)
        decodes = getattr(type(tokenizer), "_decode", None)
        # The backend decodes directly where transformers only passes ids on to it: transformers checks each id first,
        # which takes longer than decoding. (Some classes have their own decoding.)
        hands_on = getattr(decodes, "__module__", "") == "transformers.tokenization_utils_tokenizers"
        self._backend = tokenizer.backend_tokenizer if hands_on else None
        self._special = {index for index, token in decoder.items() if token.special}
        self._opening: tuple[Observation | None, str, Extension] = (None, "", Extension([]))
        self.on_opening: Callable[[Observation, str], None] | None = None
        """Called with the first observation of an episode and its text."""
        self.stop_token_ids: tuple[int, ...] = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)

    has_channels = False
    """True if the template's turns are messages in channels, which no reader here can take apart."""
    others_answer = True
    """True if all messages after the first observation count as written by others, whatever their `from_others`."""

    @abstractmethod
    def dialogue(self) -> Dialogue:
        """A new conversation."""

    def prompt(self, observation: Observation) -> list[int]:
        """Token ids of an episode's first observation, up to where the policy's turn begins."""
        return self.dialogue().begin(observation).token_ids

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Raise `InvalidStep` if the template leaves out one of a conversation's messages because of its role."""

    def opening(self, observation: Observation) -> tuple[str, Extension]:
        """An episode's first observation, as text in which each image is the template's mark, and as tokens."""
        # Cached: the members of a group start one after the other from the same observation.
        if self._opening[0] != observation:
            raw = observation.text
            text = self._open(observation) if raw is None else raw
            images = images_in(observation.messages) if raw is None else observation.images
            token_ids = self.encode(self.placeholders.write(text, images) if images else text)
            bos = self.tokenizer.bos_token_id
            if (self._bos_before_messages if raw is None else self._bos_before_text) and token_ids[:1] != [bos]:
                token_ids.insert(0, bos)
            placed = self.placeholders.locate(token_ids, images, self.encode) if images else ()
            self._opening = (observation, text, Extension(token_ids, True, placed))
        if self.on_opening is not None:
            self.on_opening(observation, self._opening[1])
        return self._opening[1:]

    @abstractmethod
    def _open(self, observation: Observation) -> str:
        """First messages, with the tools on offer, up to where the policy's turn begins."""

    @property
    def _bos_before_messages(self) -> bool:
        """True if a beginning-of-sequence token is put before first messages that do not begin with one."""
        return False

    @cached_property
    def _bos_before_text(self) -> bool:
        """True if one is put before raw text, as the tokenizer does by default."""
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer.encode("a")[0] == bos

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a policy's turn without special tokens, as environments get it."""
        return self._decode(token_ids, skip_special_tokens=True)

    def ends_turn(self, token_id: int) -> bool:
        """True for a token that ends a turn and is no part of its text. Engines may stop at other special tokens than
        `stop_token_ids`."""
        return token_id in self.stop_token_ids or token_id in self._special

    def escape(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """Escape messages for rendering: insert a `BREAK` into every special token that others have spelled out."""
        policy_text, text = self.speller.escape_policy_text, self.speller.escape
        return tuple(rewrite(m, policy_text if m.role == "assistant" else text) for m in messages)

    def spells(self, text: str) -> bool:
        """True if a completion spells out a special token."""
        return self.speller.escape_policy_text(text) != text

    # -- text that stands in the middle of a conversation -------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text that begins a sequence. Special tokens in it are encoded as such, except those with a
        `BREAK`."""
        if BREAK in text:
            # A space is the safest escape. It is used if the token would be encoded despite the `BREAK`: because it is
            # in the model's vocabulary too, or the tokenizer looks for it only after it has normalised the text.
            safe = self.encode(text.replace(BREAK, " "), add_special_tokens=add_special_tokens)
            ids = self._unbreaking.encode(text, add_special_tokens=add_special_tokens).ids if self._unbreaking else safe
            return ids if self._added_in(ids) == self._added_in(safe) else safe
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except TypeError:
            raise InvalidStep(
                "an observation's text is not valid Unicode (it holds half of a surrogate pair): replace those"
            ) from None

    def encode_after(self, last: int | None, text: str) -> list[int]:
        """Token ids of a text that follows token `last`.

        Some tokenizers encode a text's first word differently from the following ones (with an added space), so the
        text is encoded behind an anchor, which is then removed.
        """
        if not text:
            return []
        if last in self.added_tokens:
            # The tokenizer splits after an added token, so the ids are exact.
            ids = self.encode(self.added_tokens[last] + text)
            if ids[0] == last:
                return ids[1:]
        cuts: list[list[int]] = []
        for anchor_text, anchor_ids in self._anchors.items():
            ids = self.encode(anchor_text + text)
            if ids[: len(anchor_ids)] != anchor_ids:
                continue
            cuts.append(ids[len(anchor_ids) :])
            if self._decode(ids) == self._decode(anchor_ids) + text.replace(BREAK, ""):
                return cuts[-1]
        return cuts[0] if cuts else self.encode(text)

    def decode_after(self, token_ids: Sequence[int]) -> str:
        """The text that ids add to a conversation, special tokens included: also a space before the first word, which
        some tokenizers remove when they decode the ids alone. Bytes that are no text become U+FFFD."""
        anchor, anchor_text = self._anchor
        text = self._decode([*anchor, *token_ids])
        return text[len(anchor_text) :] if text.startswith(anchor_text) else self._decode(token_ids)

    def decode_escaped(self, token_ids: Sequence[int]) -> str:
        """Like `decode_after`, with a `BREAK` in every added token that the policy spelled out by other tokens."""
        text = self.decode_after(token_ids)
        escaped = self.speller.escape_policy_text(text)
        if escaped == text:
            return text
        groups = groupby(token_ids, self.added_tokens.__contains__)
        runs = [(is_added, self.decode_after([*run])) for is_added, run in groups]
        pieces = [run if is_added else self.speller.escape_policy_text(run) for is_added, run in runs]
        return "".join(pieces) if "".join(run for _, run in runs) == text else escaped

    @cached_property
    def _unbreaking(self) -> Any:
        """A copy of the tokenizer's backend that removes `BREAK`s after the search for added tokens; None without a
        backend."""
        from tokenizers import normalizers

        copied = deepcopy(getattr(self.tokenizer, "backend_tokenizer", None))
        if copied is not None:
            normalizer = [copied.normalizer] if copied.normalizer is not None else []
            copied.normalizer = normalizers.Sequence([normalizers.Replace(BREAK, ""), *normalizer])
        return copied

    def _added_in(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in self.added_tokens]

    @cached_property
    def _anchors(self) -> dict[str, list[int]]:
        """Texts behind which another text can be encoded, with their ids: the special tokens, and a line break if there
        are none or the tokenizer adds a space after them too."""
        special = [token for token in (self.tokenizer.eos_token, self.tokenizer.bos_token) if token is not None]
        return {text: self.encode(text) for text in [*special, "\n"]}

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """The ids behind which others are decoded, and their own text."""
        ids = next(iter(self._anchors.values()))
        return ids, self._decode(ids)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(token_ids), **options))


class NoRenderer(Renderer):
    """The renderer of agents with an engine that takes messages: there are no tokens to render."""

    def __init__(self) -> None:
        self.stop_token_ids = ()
        self.on_opening = None

    def spells(self, text: str) -> bool:
        return IN_APIS.search(text) is not None

    def opening(self, observation: Observation) -> tuple[str, Extension]:
        """An episode's first messages, and no tokens."""
        text = "\n".join(f"{message.role}: {message.printed}" for message in observed_messages(observation))
        if self.on_opening is not None:
            self.on_opening(observation, text)
        return text, Extension([], True)

    def dialogue(self) -> NoReturn:
        raise ConfigError("this agent renders tokens, which an API as the engine (engine.kind=openai) does not take")

    def _open(self, observation: Observation) -> NoReturn:
        self.dialogue()


@dataclass(frozen=True, slots=True)
class Extension:
    """The tokens of an observation: to append to the token sequence, or with `fork` the prompt of a new sequence; and
    the images among them, in order."""

    token_ids: list[int]
    fork: bool = False
    images: tuple[PlacedImage, ...] = ()


class Dialogue(ABC):
    """One episode's conversation: `begin`, then `add_policy_turn` (or `add_demonstration`) and `add_observation`
    alternately.

    `messages` is the readable conversation so far. Observations of raw text are appended without a template's marks.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.messages: list[Message] = []
        self.tools: tuple[ToolSpec, ...] = ()
        self.content = ""
        """The text of the policy's last turn before its tool calls; the whole text without calls."""
        self._last: int | None = None
        """The last token, which determines the encoding of the text after it."""
        self._call_ids: set[str] = set()

    def start(self, observation: Observation) -> list[int]:
        """The token ids of `begin`, for agents of text alone. Raises `InvalidStep` for an image."""
        refuse_images(observation.messages, "an agent that starts its dialogue with `start`, and not `begin`,")
        return self.begin(observation).token_ids

    def begin(self, observation: Observation) -> Extension:
        """Begin with the first observation. Returns its tokens, up to where the policy's turn begins, as those of a new
        sequence."""
        self.tools = observation.tools
        messages = self.renderer.escape(observation.messages)
        escaped = observation if messages == observation.messages else replace(observation, messages=messages)
        text, extension = self.renderer.opening(escaped)
        self._on_begin(escaped, text)
        self._append_observation(observation, extension.token_ids)
        return replace(extension, token_ids=list(extension.token_ids))

    def add_policy_turn(self, token_ids: Sequence[int]) -> Message:
        """Add the token ids of the policy's turn and return it as a message. Its calls are parsed if tools are offered;
        unreadable calls have an `error`."""
        reading = self._read(self.renderer.decode_after(self._body(token_ids))) if self.tools else Reading("")
        reading = replace(reading, calls=self._with_ids(reading.calls))
        message = self._append_turn(token_ids, reading if reading.calls else None)
        self.content = reading.content if reading.calls else message.text
        return message

    def add_demonstration(self, turn: str | Message) -> list[int]:
        """Add a recorded turn of the assistant in place of the policy's and return its token ids, with the end-of-turn
        token."""
        recorded = Message("assistant", turn) if isinstance(turn, str) else turn
        refuse_images([recorded], "a turn of the assistant")
        recorded = replace(recorded, tool_calls=self._with_ids(recorded.tool_calls))
        token_ids = self.renderer.encode_after(self._last, self._demonstration(*self.renderer.escape([recorded])))
        self._append_turn(token_ids, Reading(recorded.text, recorded.tool_calls))
        return token_ids

    def add_observation(self, observation: Observation) -> Extension:
        """Add the environment's observation, up to where the policy's next turn begins.

        Raises `InvalidStep` if it cannot be rendered, `TurnRefused` if the policy's completion is the reason.
        """
        self.tools = observation.tools or self.tools
        if observation.text is not None:
            extension = self._render_images(observation.text, observation.images)
            self._on_text(observation.text)
        else:
            mark = self.renderer.others_answer
            messages = [replace(message, from_others=mark or message.from_others) for message in observation.messages]
            extension = self._extend(replace(observation, messages=self.renderer.escape(messages)))
        self._append_observation(observation, extension.token_ids)
        return extension

    # -- overridden by the kinds --------------------------------------------------------------------------------

    @abstractmethod
    def _read(self, text: str) -> Reading:
        """Parse the tool calls of a completion, given with its special tokens."""

    @abstractmethod
    def _demonstration(self, turn: Message) -> str:
        """The text of an assistant's turn, with its end-of-turn."""

    @abstractmethod
    def _on_policy_turn(self, message: Message, token_ids: Sequence[int], reading: Reading | None) -> None:
        """Called after the policy's turn; `reading` is its parsed text, if any."""

    @abstractmethod
    def _extend(self, observation: Observation) -> Extension:
        """Render new messages."""

    def _on_begin(self, observation: Observation, text: str) -> None:
        """Called at the start of the conversation with its text."""

    def _on_text(self, text: str) -> None:
        """Called after raw text was appended."""

    def _render_images(self, text: str, images: Sequence[ImagePart], *, fork: bool = False) -> Extension:
        """The tokens of a template's text for messages with these images: after the last token, or with `fork` of a
        whole conversation."""
        text = self.renderer.placeholders.write(text, images) if images else text
        ids = self.renderer.encode(text) if fork else self.renderer.encode_after(self._last, text)
        placed = self.renderer.placeholders.locate(ids, images, self.renderer.encode) if images else ()
        return Extension(ids, fork, placed)

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _append_turn(self, token_ids: Sequence[int], reading: Reading | None) -> Message:
        text = self.renderer.text(self._body(token_ids))
        message = Message("assistant", text, reading.calls if reading else ())
        self._on_policy_turn(message, token_ids, reading)
        self.messages.append(message)
        self._last = token_ids[-1] if token_ids else self._last
        return message

    def _append_observation(self, observation: Observation, token_ids: Sequence[int]) -> None:
        raw = observation.text
        messages = observation.messages if raw is None else [Message("user", (raw, *observation.images))] if raw else []
        self.messages.extend(messages)
        self._last = token_ids[-1] if token_ids else self._last

    def _body(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A turn without its end-of-turn token."""
        return token_ids[:-1] if token_ids and self.renderer.ends_turn(token_ids[-1]) else token_ids

    def _with_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls with ids that are unique in this conversation and valid in every template: nine letters or digits.
        A call with such an id keeps it."""
        result = []
        for call in calls:
            candidates = chain([call.id], (f"call{number:05d}" for number in count(len(self._call_ids))))
            call_id = next(i for i in candidates if re.fullmatch("[a-zA-Z0-9]{9}", i) and i not in self._call_ids)
            self._call_ids.add(call_id)
            result.append(replace(call, id=call_id))
        return tuple(result)


def sampling_of(observation: Observation, renderer: Renderer) -> Mapping[str, Any] | None:
    """The sampling parameters of an observation. Its `stop`, a text that ends the policy's turn, is converted to the
    tokens that contain it.

    Raises `InvalidStep` if it is no text, or no token contains it.
    """
    parameters = observation.sampling
    if not parameters or "stop" not in parameters:
        return parameters
    if not isinstance(text := parameters["stop"], str) or not text:
        raise InvalidStep(f"the stop of an observation's sampling is a text, not {text!r:.60}")
    stop = (*renderer.stop_token_ids, *tokens_with(text, renderer))
    return {name: value for name, value in parameters.items() if name != "stop"} | {"stop_token_ids": stop}


@lru_cache(maxsize=4)  # a stranger's environment may change its `stop` at each step, and decoding takes seconds
def token_texts(renderer: Renderer) -> tuple[str, ...]:
    """The text of every token of the vocabulary."""
    return tuple(renderer.text([token]) for token in range(len(renderer.tokenizer)))


@lru_cache(maxsize=64)
def tokens_with(text: str, renderer: Renderer) -> tuple[int, ...]:
    """Ids of the tokens that contain `text`. Raises `InvalidStep` if there are none."""
    ids = tuple(token for token, token_text in enumerate(token_texts(renderer)) if text in token_text)
    if not ids:
        raise InvalidStep(f"no token of the policy's tokenizer contains {text!r}, so that no turn can stop there")
    return ids


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model folder or hub id. Raises `ConfigError` if that fails."""
    with needs("transformers", "train", "rendering prompts"):
        folder = Path(model)
        if not folder.is_dir():
            from transformers.utils import cached_file

            with contextlib.suppress(OSError):  # loading the tokenizer reports it
                folder = Path(cached_file(model, "tokenizer.json")).parent
        for file in folder.glob("tokenizer*.json"):  # a configuration may name others than `tokenizer.json`
            check_tokenizer(file)
        # The common class loads without importing torch and all of transformers' models.
        if _is_common(Path(model)):
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry; the error below is enough
    try:
        tokenizer = Tokenizer.from_pretrained(model)
        if not tokenizer.chat_template and (template := optional_file(model, "chat_template.json")):
            tokenizer.chat_template = json.loads(regular_file(template).read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]  # its first line may end with "one of:"
        raise ConfigError(f"model {model}: its tokenizer cannot be loaded ({reason})") from None
    return tokenizer


def check_tokenizer(file: Path) -> None:
    """Raise `ConfigError` for a `tokenizer.json` that cannot be read; for one that may make texts more than
    `MAX_GROWTH` times as long, since replacements of replacements write any amount of text for one letter; and for a
    decoder with a regular expression, which may take any time on a policy's text. No known model has such a decoder."""
    try:
        described = json.loads(regular_file(file).read_bytes())
        growth = max(_growth(described.get(name)) for name in ("normalizer", "pre_tokenizer", "decoder"))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} describes no tokenizer: {error}") from None
    if growth > MAX_GROWTH:
        raise ConfigError(f"{file} is not used: it may make texts more than {MAX_GROWTH} times as long")
    if '"Regex"' in json.dumps(described.get("decoder")):
        raise ConfigError(f"{file} is not used: its decoder searches with a regular expression")


def _growth(part: Any) -> float:
    """The factor by which a part of a tokenizer lengthens a text, at most. Some descriptions lack the type."""
    match part:
        case list():
            return prod(map(_growth, part))
        case {"pattern": {"String": str(pattern)}, "content": str(text)} if pattern:
            return max(1.0, len(text) / len(pattern))
        case {"pattern": _, "content": str(text)}:
            return len(text) + 1.0  # a regular expression may match nothing, at every place
        case {"precompiled_charsmap": str(table)}:
            data = b64decode(table)  # the length of an index, the index, and the texts that it leads to
            return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
        case {"type": "ByteLevel"} | {"suffix": ""} | {"word_delimiter_token": ""}:
            return 2.0
        case dict():
            return prod(map(_growth, part.values()))
    return 1.0


def _is_common(folder: Path) -> bool:
    """True if a folder's tokenizer is of transformers' common class, described by `tokenizer.json`."""
    try:
        saved = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(saved, dict) or "auto_map" in saved or not (folder / "tokenizer.json").is_file():
        return False
    return saved.get("tokenizer_class") == "TokenizersBackend"
