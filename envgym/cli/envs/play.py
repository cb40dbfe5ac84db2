"""`envgym envs try`: play an episode in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envgym.cli.errors import open_console
from envgym.cli.parser import ENV, Parser, make_spec
from envgym.errors import EnvgymError, printable
from envgym.processes import event_loop
from envgym.registry import load_component
from envgym.rollout.episode import run_episode
from envgym.rollout.runner import score_group
from envgym.rollout.scripted import PlayedTurn, ScriptedEpisode
from envgym.types import Action, Episode, Group, Observation, Task, ToolCall

from .show import choose_task, example_call, first_line, lines_of, signature

if TYPE_CHECKING:
    from rich.console import Console

    from envgym.agent import Agent
    from envgym.env import CheckedEnv, EnvSpec

OF_REPLAY = ("agent", "render", "model")
"""Settings for the tokens of recorded data."""
FENCE = '"""'
CALL = "/call"
HOW = f"An answer is one line, or several between two lines of {FENCE}. Ctrl-D ends."


def try_main(arguments: Sequence[str]) -> int:
    """Play an episode of an environment yourself; or show which tokens of recorded data are trained on. {how}
    Call a tool with a line {call} NAME {{"argument": value}}; several in one turn between {fence}.

    usage: E [--seed N] [--task N] [key=value …]
    example: envgym envs try math_verify
      envgym envs try math_verify --task test:3
    """
    parser = Parser("envs try", try_main, how=HOW, call=CALL, fence=FENCE)
    parser.add_argument("env", **ENV)
    parser.add_argument("--seed", metavar="N", type=int, help="reset seed, which also draws the task (default: random)")
    parser.add_argument("--task", metavar="N", type=_task_word, help="number of the task, test:N for a held-out one")
    options, words = parser.parse_with_words(arguments)
    replay_words = [word for word in words if word.partition("=")[0].partition(".")[0] in OF_REPLAY]
    spec = make_spec(options.env, [word for word in words if word not in replay_words])
    seed = secrets.randbelow(10_000) if options.seed is None else options.seed

    console = open_console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if is_recorded(spec):
        from .preview import preview

        event_loop.run(preview(options.env, words, options.task, seed, console))
    elif replay_words:
        parser.error(f"{replay_words[0]!r} is a setting of recorded data, and here you answer yourself")
    else:
        event_loop.run(_play(spec, seed, options.task, console))
    return 0


def is_recorded(spec: EnvSpec) -> bool:
    """True if the environment is recorded data: its agent uses no policy."""
    agent_class: type[Agent] = load_component("agent", spec.agent)
    return not agent_class.uses_policy


def _task_word(word: str) -> tuple[str, int]:
    split, _, number = word.rpartition(":")
    if split not in ("", "train", "test") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"a task is a number, or test: and a number, not {word!r}")
    return split, int(number)


class ByHand(ScriptedEpisode):
    """An episode that the user plays in the terminal."""

    def __init__(self, console: Console, task: Task, seed: int) -> None:
        super().__init__(task, seed, lambda turn, observation: _ask(console))
        self._console = console

    async def reset(self, env: CheckedEnv) -> Observation:
        observation = await super().reset(env)
        _show(self._console, observation)
        for tool in observation.tools:
            self._console.print(f"tool {signature(tool)}", style="bold green")
            self._console.print(f"  {first_line(tool)}\n  {example_call(tool, CALL)}")
        self._console.print(HOW, style="dim")
        return observation

    async def step(self, env: CheckedEnv, action: Action) -> PlayedTurn:
        turn = await super().step(env, action)
        _show(self._console, turn.observation)
        if turn.reward and not self.has_ended:
            self._console.print(f"reward {turn.reward:g}", style="dim")
        return turn


async def _play(spec: EnvSpec, seed: int, word: tuple[str, int] | None, console: Console) -> None:
    from envgym.services import start_services

    async with start_services(spec, eager=False):
        _, task = await choose_task(spec, seed, word)
        console.print(printable(f"{spec.id}, task {task.key}, seed {seed} (repeat it with --seed {seed})"), style="dim")
        by_hand = ByHand(console, task, seed)
        episode = await run_episode(spec.spec_for(task), task, by_hand.play, math.inf)
        if by_hand.has_ended:
            await score_group(spec, Group("by hand", task, [episode]), math.inf)
        if episode.failed:
            raise by_hand.error or EnvgymError(episode.outcome.message)
        _show_result(console, by_hand, episode)


def _show_result(console: Console, by_hand: ByHand, episode: Episode) -> None:
    turns = "1 turn" if len(by_hand.turns) == 1 else f"{len(by_hand.turns)} turns"
    if not by_hand.has_ended:
        return console.print(f"left after {turns}")
    ending = "terminated" if by_hand.turns[-1].terminated else "truncated"
    numbers = {"reward": episode.reward, "score": episode.score} | episode.metrics
    values = [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
    return console.print(printable(f"{ending} after {turns}: {', '.join(values) or 'no reward'}"), style="bold")


def _show(console: Console, observation: Observation) -> None:
    for role, text in lines_of(observation):
        console.print(printable(f"{role}:"), style="bold cyan")
        console.print(printable(text))


# ---------------------------------------------------------------------------------------------------------
# What the user types


def _ask(console: Console) -> Action | None:
    """The user's turn, with bytes in place of token ids; None at the end of the input."""
    while True:
        text = _read()
        if text is None:
            return None
        lines = [line for line in text.splitlines() if line.strip()]
        if not all(line.startswith(CALL) for line in lines):
            lines = []
        try:
            calls = tuple(_call(line, number) for number, line in enumerate(lines))
        except ValueError as error:
            console.print(f"not sent: {error}", style="red")
        else:
            return Action(text, tuple(text.encode("utf-8", "replace")), calls)


def _call(line: str, number: int) -> ToolCall:
    """`/call name {…}` as a call. Raises `ValueError` for anything else."""
    name, _, text = line.removeprefix(CALL).strip().partition(" ")
    try:
        arguments: Any = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"the arguments of {name} are no JSON ({error})") from None
    if not name or not isinstance(arguments, Mapping):
        raise ValueError(f'a call is written {CALL} NAME {{"argument": value}}')
    return ToolCall(f"call_{number}", name, arguments)


def _read() -> str | None:
    """One answer: a line, or the lines between two fences. None at the end of the input."""
    first = _line("> ")
    if first is None or not first.lstrip().startswith(FENCE):
        return first
    text = first.lstrip().removeprefix(FENCE)
    while FENCE not in text:
        line = _line("… ")
        if line is None:
            return None
        text += f"\n{line}"
    return text.partition(FENCE)[0].strip("\n")


def _line(prompt: str) -> str | None:
    """A line of standard input; None at its end. Ctrl-C ends the reading, and then the command."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lets `input` edit lines
    sys.stdout.flush()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt if is_terminal else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, handler)
        signal.raise_signal(signal.SIGINT)  # to the loop, which could not have ended the reading
        raise asyncio.CancelledError from None
    finally:
        signal.signal(signal.SIGINT, handler)
