"""Writes `verdicts.json`: the verdicts of IFEval's published checker on the answers of `answers.py`.

    python tests/envs/instruction_following/published.py CHECKER ifeval.jsonl

CHECKER is a folder that holds `lm_eval/tasks/ifeval`, the checker as lm-evaluation-harness has it, such as the unpacked
wheel `lm_eval-0.4.13`; langdetect 1.0.9, nltk 3.10 with its data `punkt_tab`, and immutabledict must be installed.
"""

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from answers import answers

checker, rows = sys.argv[1:]
sys.path.insert(0, checker)
import langdetect  # noqa: E402
from lm_eval.tasks.ifeval import utils  # noqa: E402

langdetect.DetectorFactory.seed = 0


def verdicts(row, text):
    """Strict and loose verdicts on each instruction, as `101/111`. The verdict on a letter that is none, for which the
    checker counts a random one, is `-`."""
    example = SimpleNamespace(**row)
    parts = []
    for test in (utils.test_instruction_following_strict, utils.test_instruction_following_loose):
        followed = test(example, text).follow_instruction_list
        are_counted = [arguments.get("letter", "a").isalpha() for arguments in row["kwargs"]]
        parts.append("".join(str(int(f)) if c else "-" for f, c in zip(followed, are_counted, strict=True)))
    return "/".join(parts)


result, digest = {}, hashlib.sha256()
for line in Path(rows).read_text().splitlines():
    row = json.loads(line)
    texts = answers(row)
    digest.update(json.dumps(texts).encode())
    result[str(row["key"])] = " ".join(verdicts(row, text) for text in texts)
versions = {name: version(name) for name in ("langdetect", "nltk")}
lines = ",\n".join(f'    "{key}": "{value}"' for key, value in result.items())
head = json.dumps({"checker": Path(checker).name, **versions, "answers": digest.hexdigest()}, indent=2)[:-2]
(Path(__file__).parent / "verdicts.json").write_text(f'{head},\n  "verdicts": {{\n{lines}\n  }}\n}}\n')
