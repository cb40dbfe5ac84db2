"""`envgym envs try`: play an episode in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envgym.cli.parser import ENV, Parser, make_spec
from envgym.errors import ConfigError, printable
from envgym.processes import event_loop
from envgym.registry import load_component
from envgym.types import Action, Observation, Task, ToolCall, ToolSpec

from .show import example_call, first_line, lines_of, signature

if TYPE_CHECKING:
    from rich.console import Console

    from envgym.agent import Agent
    from envgym.check.play import Played
    from envgym.env import EnvSpec

OF_REPLAY = ("agent", "render", "model")
"""Settings that decide how recorded data become tokens."""
FENCE = '"""'
CALL = "/call"
HOW = f"An answer is one line, or several between two lines of {FENCE}. Ctrl-D ends."


def try_main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "envs try",
        "E [--seed N] [--task N] [key=value …]",
        f"Play an episode of an environment yourself; of recorded data, see its tokens and which are taught. {HOW} "
        f'A tool is called by a line {CALL} NAME {{"argument": value}}; several, between {FENCE}, in one turn.',
        "envgym envs try math_verify\n  envgym envs try math_verify --task test:3",
    )
    parser.add_argument("env", **ENV)
    parser.add_argument("--seed", metavar="N", type=int, help="reset seed, which also draws the task (at random)")
    parser.add_argument("--task", metavar="N", type=_task_word, help="number of the task, test:N for a held-out one")
    options, words = parser.parse_with_words(arguments)
    of_replay = [word for word in words if word.partition("=")[0].partition(".")[0] in OF_REPLAY]
    spec = make_spec(options.env, [word for word in words if word not in of_replay])
    seed = secrets.randbelow(10_000) if options.seed is None else options.seed
    if replays(spec):
        from rich.console import Console

        from .preview import preview

        console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        event_loop.run(preview(options.env, words, options.task, seed, console))
    elif of_replay:
        parser.error(f"{of_replay[0]!r} is for recorded data: you answer yourself here")
    else:
        event_loop.run(_play(spec, seed, options.task))
    return 0


def replays(spec: EnvSpec) -> bool:
    """The environment is recorded data, which an agent plays that uses no policy."""
    agent_class: type[Agent] = load_component("agent", spec.agent)
    return not agent_class.uses_policy


def _task_word(word: str) -> tuple[str, int]:
    split, _, number = word.rpartition(":")
    if split not in ("", "train", "test") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"a task is a number, or test: and a number, not {word!r}")
    return split or "train", int(number)


async def _choose(spec: EnvSpec, seed: int, word: tuple[str, int] | None) -> Task:
    split, number = word or ("train", random.Random(seed).randrange(spec.tasks("train").reach))
    try:
        return await spec.tasks(split).get(number)
    except IndexError:
        raise ConfigError(f"there is no task {number} in {split}: it has {spec.tasks(split).size}") from None


async def _play(spec: EnvSpec, seed: int, word: tuple[str, int] | None) -> None:
    from rich.console import Console

    from envgym.check.play import Played, Turn
    from envgym.services import start_services

    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    async with start_services(spec, now=False):
        task = await _choose(spec, seed, word)
        played = Played(task, seed, "by hand")
        console.print(f"{spec.id}, task {task.key}, seed {seed} (the same again: --seed {seed})", style="dim")
        async with spec.of(task).make() as env:
            played.first, _ = await env.reset(seed=seed, options={"task": task})
            _show(console, played.first)
            _show_tools(console, played.first.tools)
            console.print(HOW, style="dim")
            while not played.ended:
                action = _ask(console)
                if action is None:
                    console.print(f"left after {_turns(played)}")
                    return
                start = time.monotonic()
                played.turns.append(Turn(action, *await env.step(action), time.monotonic() - start))
                _show(console, played.turns[-1].observation)
                if not played.ended and (reward := played.turns[-1].reward):
                    console.print(f"reward {reward:g}", style="dim")
        await _result(console, spec, played)


async def _result(console: Console, spec: EnvSpec, played: Played) -> None:
    """Print the result, judged as a group of one where the environment judges groups."""
    from envgym.check.play import judged

    how = "terminated" if played.turns[-1].terminated else "truncated"
    (episode,) = await judged(spec, played.task, [played.episode()]) or [played.episode()]
    numbers = {"reward": episode.reward, "score": episode.score} | episode.metrics
    known = [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
    console.print(f"{how} after {_turns(played)}: {', '.join(known) or 'no reward'}", style="bold")


def _turns(played: Played) -> str:
    return f"{len(played.turns)} turn{'' if len(played.turns) == 1 else 's'}"


def _show(console: Console, observation: Observation) -> None:
    for role, text in lines_of(observation):
        console.print(f"{role}:", style="bold cyan")
        console.print(printable(text))


def _show_tools(console: Console, tools: Iterable[ToolSpec]) -> None:
    for tool in tools:
        console.print(f"tool {signature(tool)}", style="bold green")
        console.print(f"  {first_line(tool)}\n  {example_call(tool, CALL)}")


# ---------------------------------------------------------------------------------------------------------
# What the user types


def _ask(console: Console) -> Action | None:
    """The user's turn; None where there will be none."""
    from envgym.check.play import action_of

    while True:
        text = _read()
        if text is None:
            return None
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines or not all(line.startswith(CALL) for line in lines):
            return action_of(text)
        try:
            calls = tuple(_call(line, number) for number, line in enumerate(lines))
        except ValueError as error:
            console.print(f"not sent: {error}", style="red")
        else:
            return Action(text, action_of(text).token_ids, calls)


def _call(line: str, number: int) -> ToolCall:
    """`/call name {…}` as a call. Raises `ValueError` for anything else."""
    name, _, rest = line.removeprefix(CALL).strip().partition(" ")
    try:
        arguments: Any = json.loads(rest) if rest.strip() else {}
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
    """A line of standard input. Ctrl-C raises `KeyboardInterrupt` here, as it does outside an event loop."""
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
    finally:
        signal.signal(signal.SIGINT, handler)
