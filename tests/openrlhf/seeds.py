"""The commands of the documents in `commands.md`, as a shell hands them to the programs that stand before them."""

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STUBS = r"""
report() { printf -v line '%s\x1f' "$@"; printf '%s\x1e' "$line" >> "$LOG"; }
for program in deepspeed torchrun ray srun uv python python3; do eval "$program() { report $program \"\$@\"; }"; done
sleep() { :; }
"""
"""Shell functions in the launchers' places, which write down what they are called with."""


@dataclass(frozen=True)
class Command:
    place: str
    """Document and line of its block."""
    launcher: tuple[str, ...]
    program: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}-{self.program}"


@cache
def blocks() -> dict[str, str]:
    text = Path(__file__).with_name("commands.md").read_text()
    return dict(re.findall(r"<!-- (\S+) -->\n```bash\n(.*?)\n```\n", text, re.DOTALL))


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
