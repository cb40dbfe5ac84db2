"""The answer-blind plays, the cheats and the demonstrations of an environment, as scripts."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from envgym.check.leak import answer_text
from envgym.check.play import text_of
from envgym.check.scripts import MAX_TURNS, demonstration_script, monkey, text_action, value_of
from envgym.check.subject import Subject
from envgym.rollout.scripted import NO_ACTIONS, Script
from envgym.types import Action, Message, Observation, Task, ToolCall

from .fields import CHEATS, CONSTANTS, DATA, Fields, echoes, fill, guess_fields, names_in
from .forms import IN_BLOCK, RAW, USUAL, Form, Turns, is_program, last_text, split_form

TASKS = 50
"""Tasks of a cheat that pays. An environment with fewer repeats them with other seeds."""
MODELS = 8
"""Number of further tasks, whose demonstrations show the form of a right answer."""
FORMS = 2
"""Maximum number of forms."""
GUESSES = 12
"""Number of answers of which each is given to all tasks, and of words that are guesses if no answers are known."""
_ESCAPE = re.compile(r"\.\.|^/|[;$]")
_DESTRUCTIVE = re.compile(DATA["destructive"], re.IGNORECASE)
CheatTurns = Sequence[Mapping[str, str]]
"""The turns of a cheat as `cheats.yaml` has them: what to `say` and to `call`."""
_CHANGES: Mapping[str, Callable[[Turns], Turns]] = {
    "first": lambda turns: [*list(turns[:1]) * MAX_TURNS, *turns],
    "twice": lambda turns: [turn for turn in turns for _ in range(2)],
    "calls": lambda turns: [*list(turns[:-1]) * 4, *turns],
    "before": lambda turns: [*turns[:-1], f"{CONSTANTS['filler']()}\n{last_text(turns)}"],
    "after": lambda turns: [*turns[:-1], f"{last_text(turns)}\n{CONSTANTS['filler']()}"],
}
"""Changes of a right answer that may make it earn more than is due."""


@dataclass(frozen=True, slots=True)
class CheatAttempt:
    """A play with a name. `scripts` returns new scripts for a task and the number of its episode: the play's variants,
    in the forms of right answers, for example."""

    kind: str
    name: str
    scripts: Callable[[Task, int], list[Script]]


class CheatAttempts:
    """All attempts at one environment. Call `prepare` first.

    A cheat knows the answers and the demonstrations of other tasks, and not those of its own.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.tasks: list[Task] = []
        self.right_value = 1.0
        """The reward of a demonstration that is right; 1 if there are none."""
        self._guesses: Counter[str] = Counter()
        self._has_answers = False
        self._right_forms: list[Form] = []
        self._openings: list[Observation] = []

    async def prepare(self) -> None:
        """Read the tasks; find the forms of right answers, and guesses."""
        tasks = await self._subject.tasks(TASKS + MODELS)
        models = tasks[TASKS:] or tasks[:MODELS]
        tasks = tasks[:TASKS]
        self.tasks = [*islice(cycle(tasks), TASKS)]
        for number, task in enumerate(models):
            episode = await self._subject.play(task, number, NO_ACTIONS)
            self._openings += [] if episode.opening is None else [episode.opening]
            await self._learn_forms(task, number)
        self._guesses = Counter(answer for task in tasks if (answer := self._answer(task)))
        self._has_answers = bool(self._guesses)
        if not self._guesses:
            words = Counter(word for text in map(text_of, self._openings) for word in set(re.findall(r"\w+", text)))
            self._guesses = Counter(dict(words.most_common(GUESSES)))

    def attempts(self) -> Iterator[CheatAttempt]:
        """The attempts in their order: the answer-blind plays, the cheats, the demonstrations, and what needs right
        episodes, which come last since an environment may remember those."""
        forms = self._right_forms and [RAW, *(form for form in self._right_forms if form != RAW)]
        is_for_programs = any(map(is_program, [*map(text_of, self._openings), *(form.prefix for form in forms)]))
        yield from self._blind_plays(forms or USUAL)
        for kind in ("texts", "echoes", "hanging") if self._has_answers else ("texts", "hanging"):
            yield from self._cheats(kind, [RAW] if is_for_programs else forms or USUAL)
        if any(opening.tools for opening in self._openings):
            yield from self._cheats("tools", list(dict.fromkeys(replace(form, lead=()) for form in forms or [RAW])))
        if is_for_programs:
            for kind in ("programs", "endless_programs"):
                yield from self._cheats(kind, self._right_forms or [RAW, IN_BLOCK])
        for name in dict.fromkeys(name for task in self.tasks for name in self._authors_cheats(task, 0)):
            yield CheatAttempt("author", name, partial(self._authors_scripts, name))
        if n_variants := max(len(self._subject.demonstrations(task)) for task in self.tasks):
            yield CheatAttempt("demonstrations", "demonstrations", partial(self._right_scripts, n_variants, list))
            yield from self._cheats("left_behind", [RAW])
            for name, change in CHEATS["excess"].items():
                scripts = partial(self._right_scripts, min(n_variants, FORMS), _CHANGES[change])
                yield CheatAttempt("excess", name, scripts)

    # -- forms and guesses --------------------------------------------------------------------------------

    async def _learn_forms(self, task: Task, number: int) -> None:
        """Add the forms of a task's demonstrations that are right."""
        for turns in self._subject.demonstrations(task):
            form, _ = split_form(turns, answer_text(task.answer))
            if len(self._right_forms) < FORMS and not any(map(form.is_like, self._right_forms)):
                episode = await self._subject.play(task, number, demonstration_script(turns))
                if (episode.result.score or episode.result.reward or 0.0) > 0:
                    self._right_forms.append(form)
                    self.right_value = episode.result.reward or 1.0

    def _answer(self, task: Task) -> str:
        """The answer in a task's demonstration of the usual form; without demonstrations the reference answer."""
        answers = [split_form(turns, answer_text(task.answer)) for turns in self._subject.demonstrations(task)]
        in_form = (text for form, text in answers if any(map(form.is_like, self._right_forms)))
        return next(in_form, answers[0][1] if answers else answer_text(task.answer))

    # -- scripts ------------------------------------------------------------------------------------------

    def _blind_plays(self, forms: Sequence[Form]) -> Iterator[CheatAttempt]:
        texts = {f"always {guess!r:.50}": guess for guess, _ in self._guesses.most_common(GUESSES)} | DATA["blind"]
        for name, text in texts.items():
            yield CheatAttempt("blind", name, partial(self._scripts, [{"say": text}], forms))
        yield CheatAttempt("blind", "random actions", lambda task, number: [monkey(number)])
        if not self._has_answers:  # a copy of a possible move is no cheat
            yield from (replace(attempt, kind="blind") for attempt in self._cheats("echoes", forms))
        if any(map(self._subject.demonstrations, self.tasks)):
            yield CheatAttempt("blind", "another task's demonstration", self._foreign_scripts)

    def _cheats(self, kind: str, forms: Sequence[Form]) -> Iterator[CheatAttempt]:
        for name, cheat in CHEATS[kind].items():
            turns = [{"say": cheat}] if isinstance(cheat, str) else cheat
            yield CheatAttempt(kind, name, partial(self._scripts, turns, forms))

    def _scripts(self, turns: CheatTurns, forms: Sequence[Form], task: Task, number: int) -> list[Script]:
        return [self._script(turns, form, task, number) for form in forms]

    def _script(self, turns: CheatTurns, form: Form, task: Task, number: int) -> Script:
        """A script of the turns of a form before its last one, then of a cheat's `turns` in this form."""
        rng, observations, right_answer = random.Random(f"guess {number}"), list[Observation](), self._answer(task)
        # In the order of the counts over all tasks: without its own task, the rarest would tell the answer.
        answers = [answer for answer, n in self._guesses.most_common() if answer != right_answer or n > 1]
        guesses = guess_fields(answers, rng, (self._right_forms or [RAW])[0].text)

        def script(turn: int, observation: Observation) -> Action | None:
            observations.append(observation)
            if turn < len(form.lead):
                return text_action(form.lead[turn])
            cheat = turns[min(turn - len(form.lead), len(turns) - 1)]
            fields: Fields = {}
            if "{" in str(cheat):
                fields = {**CONSTANTS, **guesses, **echoes(observations, guesses["guess"](), rng)}
            text = form.text(fill(cheat["say"], fields)) if "say" in cheat else ""
            calls = _calls(cheat["call"], observations, fields, answers[:GUESSES]) if "call" in cheat else ()
            return text_action(Message("assistant", text, tool_calls=tuple(calls))) if turn < MAX_TURNS else None

        return script

    def _right_scripts(self, count: int, change: Callable[[Turns], Turns], task: Task, number: int) -> list[Script]:
        """Scripts of `count` variants of the demonstrations, with a change."""
        variants = [change(turns) for turns in self._subject.demonstrations(task)[:count]] or [()]
        return [demonstration_script(turns) for turns in islice(cycle(variants), count)]

    def _foreign_scripts(self, task: Task, number: int) -> list[Script]:
        """Twice a demonstration of a random task."""
        rng = random.Random(f"demonstration {number}")
        return [demonstration_script(rng.choice(self._subject.demonstrations(rng.choice(self.tasks)) or [[]]))] * 2

    def _authors_scripts(self, name: str, task: Task, number: int) -> list[Script]:
        return [demonstration_script(self._authors_cheats(task, number).get(name, ()))]

    def _authors_cheats(self, task: Task, seed: int) -> Mapping[str, Turns]:
        return self._subject.spec.spec_for(task).cheats(task, seed)


def _calls(text: str, observations: Sequence[Observation], fields: Fields, guesses: Sequence[str]) -> list[ToolCall]:
    """A call of every tool with a text for each argument; with `{name}` or `{each}` for each name or guess."""
    names = names_in(observations[-1]) if "{name}" in text else [""]
    guesses = guesses if "{each}" in text else [""]
    texts = [text.replace("{name}", name).replace("{each}", guess) for name in names for guess in guesses]
    values = [fill(text, fields) for text in texts]
    calls: list[ToolCall] = []
    for tool in observations[0].tools:
        is_risky = _DESTRUCTIVE.search(f"{tool.name} {tool.description}") is not None
        properties = tool.parameters.get("properties", {})
        for value in [value for value in values if not (is_risky and _ESCAPE.search(value))]:
            arguments = {name: _argument(schema, value) for name, schema in properties.items()}
            calls.append(ToolCall(f"call_{len(calls)}", tool.name, arguments))
    return calls


def _argument(schema: Mapping[str, Any], text: str) -> Any:
    """An argument of a tool: the text, or its number, or a random value if the schema takes neither."""
    if schema.get("type") in ("integer", "number") and re.fullmatch(r"-?\d{1,15}", text):
        return int(text)
    return value_of(schema, random.Random(text), [text])
