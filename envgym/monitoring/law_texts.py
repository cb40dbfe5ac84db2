"""The laws of texts: what conversations, tokens, templates and grades must say alike.

Tokens are read with the tokenizer in the model's folder, templates rendered by the tokenizer alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from envgym.types import Episode, Message

if TYPE_CHECKING:
    from envgym.render import Renderer

ANSWER = "qx2said"
"""A text that no template contains."""
TOLERANCE = 0.02
"""Part of a number by which an answer may differ from it, and be graded either way."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Texts:
    """Compares the conversations of episodes with their tokens."""

    def __init__(self, renderer: Renderer, file: Path) -> None:
        from tokenizers import Tokenizer

        self._renderer = renderer
        self._tokenizer: Any = Tokenizer.from_file(str(file)) if file.is_file() else None
        self._frames: dict[tuple[str, bool], tuple[str, str]] = {}
        """The text around the first single message of each role, and whether the turn before it had ended."""

    def read(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """`laws/undecoded_share` of messages that are not among their tokens; `laws/unsampled_texts`, the share of
        episodes in which a turn's tokens hold another's message; `laws/template_drift`, the share of later turns before
        which the text is not what the template writes there, or wrote before."""
        undecoded, foreign_texts, drifts = list[bool](), list[bool](), list[bool]()
        for episode in episodes if self._tokenizer is not None else ():
            numbers = [number for number, message in enumerate(episode.messages) if message.role == "assistant"]
            messages = episode.messages[: numbers[-1] + 1] if numbers else []
            segments = [segment for row in episode.rows for segment in row.segments]
            if not messages or not segments or any(segment.images for segment in segments):
                continue
            rows = [[token for segment in row.segments for token in segment.token_ids] for row in episode.rows]
            # A message has no special token that the policy sampled within it.
            texts = ["\n".join([self._decode(row, skip_special=skip) for row in rows]) for skip in (False, True)]
            undecoded += [all(m.text.strip() not in text for text in texts) for m in messages if self._is_exact(m)]
            foreign_texts.append(self._holds_foreign_text(episode, messages))
            drifts += self._drifts(episode, messages)
        shares = {"undecoded_share": undecoded, "unsampled_texts": foreign_texts, "template_drift": drifts}
        return {f"laws/{name}": fmean(values) for name, values in shares.items() if values}

    def _decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))

    def _is_exact(self, message: Message) -> bool:
        """True for a message that a template writes unchanged and this tokenizer can write."""
        text = message.text.strip()
        if message.role == "tool" or message.tool_calls or not text or "\ufffd" in text or self._renderer.spells(text):
            return False
        return self._decode(self._tokenizer.encode(text, add_special_tokens=False).ids) == text

    def _holds_foreign_text(self, episode: Episode, messages: Sequence[Message]) -> bool:
        answers = "\n".join(message.text for message in messages if message.role == "assistant")
        texts = [m.text.strip() for m in messages if m.role in ("user", "tool") and self._is_exact(m)]
        segments = [segment for row in episode.rows for segment in row.segments]
        turns = [self._decode(s.token_ids) for s in segments if s.role == "action" and s.logprobs is not None]
        return any(text in turn and text not in answers for text in texts for turn in turns)

    def _drifts(self, episode: Episode, messages: Sequence[Message]) -> Iterator[bool]:
        """For each observation between two turns: whether its text is not what the template writes between them. Where
        the template cannot say that (tools, raw text), whether the text around a single message differs from that
        around earlier ones, or the text after it from that after the first prompt. An episode that went on in another
        sequence is one drift if the template can continue the first."""
        [row, *more_rows] = episode.rows
        if more_rows:
            yield from [True] * self._continues(messages)
            return
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        opening, *observed = [messages[a + 1 : b] for a, b in zip([-1, *turns], turns, strict=False)]
        roles = [segment.role for segment in row.segments]
        if roles != ["prompt", *["action", "feedback"] * len(observed), "action"] or not opening:
            return
        _, is_shown, end_of_opening = self._decode(row.segments[0].token_ids).rpartition(opening[-1].text.strip())
        for answer, feedback, between in zip(row.segments[1::2], row.segments[2::2], observed, strict=False):
            text, end = self._decode(feedback.token_ids), answer.token_ids[-1:]
            has_ended = bool(end) and self._renderer.ends_turn(end[0])
            if all(map(self._is_exact, between)) and (expected := self._text_between(opening, between)):
                yield text != (expected.removeprefix(self._decode(end)) if has_ended else expected)
            elif len(between) == 1 and is_shown:
                head, body, tail = text.partition(between[0].text.strip())
                frame = self._frames.setdefault((between[0].role, has_ended), (head, tail))
                if body:
                    yield frame != (head, tail) or tail != end_of_opening

    def _text_between(self, opening: Sequence[Message], observed: Sequence[Message]) -> str:
        """The text from an answer on to the policy's next turn; empty if the template does not write it."""
        text = self._render([*opening, Message.assistant(ANSWER), *observed])
        head, is_shown, text = text.partition(ANSWER)
        return text if is_shown and head == self._render(opening) else ""

    def _continues(self, messages: Sequence[Message]) -> bool:
        """True if the template writes what comes before each turn as the beginning of what comes before the next."""
        numbers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        texts = [self._render(messages[:number]) for number in numbers]
        answers = [messages[number].text for number in numbers]
        pairs = zip(texts, answers, texts[1:], strict=False)
        return all(map(self._is_exact, messages)) and all(b.startswith(a + answer) for a, answer, b in pairs if a)

    def _render(self, messages: Sequence[Message]) -> str:
        plain = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return str(self._renderer.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))
        except Exception:  # a template's code can raise any error
            return ""


def number_of(text: object) -> float | None:
    """The number that a text is, apart from separators between thousands; None for other texts."""
    plain = str(text).replace(",", "").replace("$", "").strip()
    return float(plain) if NUMBER.fullmatch(plain) else None


def misgraded_answers(episodes: Sequence[Episode]) -> list[bool]:
    """Of each episode with a score, and with a number as the answer that the environment has read, and as the task's:
    whether it has not got the full score although the two are the same, or has got it although they are not, beyond the
    `TOLERANCE` that a grader may have."""
    verdicts = []
    for episode in (episode for episode in episodes if episode.answer is not None):
        answer, gold = number_of(episode.answer), number_of(episode.task.answer)
        if episode.score is None or answer is None or gold is None or 0 < abs(answer - gold) <= TOLERANCE * abs(gold):
            continue
        verdicts.append((answer == gold) != (episode.score >= 1))
    return verdicts


def misread_answers(episodes: Sequence[Episode]) -> list[bool]:
    """Of each episode with a number that the environment has read as the answer: whether it is not a number of the last
    message, or not the one in its last box. Of the others whose last box has the task's answer: whether none was read,
    and the score is 0."""
    verdicts = []
    for episode in episodes:
        last = next((m.text for m in reversed(episode.messages) if m.role == "assistant"), "")
        boxes = [number_of(text) for text in re.findall(r"\\boxed\{([^{}]*)\}", last)][-1:]
        answer = number_of(episode.answer)
        if answer is not None:
            numbers = {abs(float(text)) for text in NUMBER.findall(last.replace(",", ""))}
            verdicts.append(abs(answer) not in numbers or boxes not in ([], [None], [answer]))
        elif boxes == [number_of(episode.task.answer)]:
            verdicts.append(episode.answer is None and episode.score == 0)
    return verdicts
