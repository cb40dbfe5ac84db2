"""The commands of `commands.md` as a shell hands them to the programs that stand before them; and, where `ENVGYM_SEEDS`
names the folder, those of the documents that the project was created from, and their files for OpenRLHF."""

import os
import re
import subprocess
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "ENVGYM_SEEDS"
STUBS = r"""
report() { printf -v line '%s\x1f' "$@"; printf '%s\x1e' "$line" >> "$LOG"; }
for program in deepspeed torchrun ray srun uv python python3; do eval "$program() { report $program \"\$@\"; }"; done
sleep() { :; }
pip() { :; }
"""
"""Shell functions in the launchers' places, which write down what they are called with."""
BLOCK = re.compile(
    r"^```bash\n(.*?)^```$|^\.\. code-block:: (?:bash|shell)\n((?:[ \t]+\S[^\n]*\n|[ \t]*\n)+)",
    re.MULTILINE | re.DOTALL,
)
"""A block of shell commands, in Markdown and in reStructuredText."""


@dataclass(frozen=True)
class Command:
    place: str
    """Document and line of its block, or the block's name in `commands.md`."""
    launcher: tuple[str, ...]
    program: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}-{self.program}"


@dataclass(frozen=True)
class File:
    """A file as a document shows it: from a line on, to the end of the block."""

    document: str
    line: int
    indents: str = ""
    """The lines' depths, where the document has lost them: a digit a line, in groups of ten."""
    before: str = ""
    """Code before it that the document leaves to its reader."""
    filled: tuple[tuple[str, str], ...] = ()
    """What stands in place of text that the document leaves to its reader."""


FILES = {
    "agent_turns": File("000", 159),
    "reward_label": File(
        "000", 103, before="def your_reward_logic(query, label):\n    return float(str(label) in query)\n"
    ),
    "agent_random": File("001", 587),
    "reward_random": File("001", 521),
    "agent_math": File("004", 1399, "0000012221 2221222222 2344455554 5555344442 3333223333 3344432012"),
    "agent_execute": File(
        "004", 1355, "0000112212 2122222222 2323223333 3320112122",
        before="def calculate_reward(action_text, label):\n    return float(str(label) in action_text)\n",
    ),
    "reward_tests": File("004", 1172, "0000001112 2233443344 4433343434 2323234112 223321"),
    "reward_quality": File("004", 1288, "0000001112 2222222222 3211222333 21"),
    "reward_prints": File(
        "004", 1528, "01111", before="import torch\n",
        filled=(("# ... reward logic",
                 "return torch.tensor([float(label in query) for query, label in zip(queries, labels)])"),),
    ),
    "reward_filter": File(
        "004", 1334, "011112221",
        before="import torch\n\ndef calculate_rewards(queries, labels):\n"
               "    return torch.tensor([1.5 if label in query else -0.5 for query, label in zip(queries, labels)])\n",
        filled=(("calculate_rewards(...)", "calculate_rewards(queries, labels)"),),
    ),
    "reward_math": File("004", 1233, "0000111222 2222223232 2323454534 112223321"),
    "reward_each": File(
        "004", 1148, "0011222123 3311112221",
        filled=(("[...]", "[float(label in query) for query, label in zip(queries, labels)]"),),
    ),
}  # fmt: skip


@cache
def documents() -> dict[str, str]:
    """The text of each document by its number; empty where the variable names no folder."""
    folder = os.environ.get(VARIABLE)
    return {path.name[:3]: path.read_text("utf-8") for path in sorted(Path(folder).glob("*.txt"))} if folder else {}


@cache
def blocks() -> dict[str, str]:
    """The blocks that call OpenRLHF's programs: those of `commands.md` by name, the documents' by number and line."""
    text = Path(__file__).with_name("commands.md").read_text()
    found = dict(re.findall(r"<!-- (\S+) -->\n```bash\n(.*?)\n```\n", text, re.DOTALL))
    for number, text in documents().items():
        for match in BLOCK.finditer(text):
            body = textwrap.dedent(match[1] or match[2] or "")
            if re.search(r"openrlhf\.cli|train_dpo\.py", body):
                found[f"{number}:{text.count(chr(10), 0, match.start()) + 2}"] = body
    return found


def document_file(name: str) -> str:
    """The file of a document as it stands there, with what it leaves to its reader filled in."""
    file = FILES[name]
    lines = documents()[file.document].split("\n")[file.line - 1 :]
    lines = lines[: next(number for number, line in enumerate(lines) if line.startswith("```"))]
    if file.indents:
        lines = ["    " * int(depth) + line for depth, line in zip(file.indents.replace(" ", ""), lines, strict=True)]
    text = "\n".join([file.before, *lines, ""])
    for gap, code in file.filled:
        assert gap in text
        text = text.replace(gap, code)
    return text


def commands(place: str, folder: Path) -> list[Command]:
    """What a block calls, in order, each once."""
    log = folder / f"{place.replace(':', '_')}.log"
    script = f"LOG={log}\n{STUBS}\n{blocks()[place]}\nwait"
    subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, timeout=60, check=False)
    calls = [line.split("\x1f")[:-1] for line in log.read_text().split("\x1e") if line] if log.exists() else []
    found: dict[Command, None] = {}
    for call in calls:
        at = next((n for n, word in enumerate(call) if word.startswith("openrlhf.cli.") or word.endswith(".py")), None)
        if at is not None and call[at - 1] != "--remote_rm_url":
            program = call[at].removeprefix("openrlhf.cli.")
            found[Command(place, tuple(call[:at]), program, tuple(call[at + 1 :]))] = None
    return list(found)
