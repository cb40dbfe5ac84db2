"""Copy the stored results of `tests/acceptance/test_failed_reward.py` to the page on failures."""

from __future__ import annotations

from record import ROOT, fill_docs, table
from starter_figures import read

PAGE = ROOT / "docs" / "reference" / "failure_kinds.md"
NAMES = {
    "before": "before training",
    "sound": "a wrong answer gets 0",
    "crashes": "a wrong answer raises an error",
    "crashes_rewarded": "the same, with `rollout.failed_reward=0`",
}


def main() -> None:
    figures, conditions = read("failed_reward")
    clean, _ = read("failed_reward_clean")
    rows = []
    for name, run in figures["runs"].items():
        low, high = run["ci95"]
        reward = "" if run["first_reward"] is None else f"{run['first_reward']:.3f} → {run['last_reward']:.3f}"
        failed = f"{run['failed_share']:.0%}" if run["failed_share"] else ""
        score = f"{run['score']:.3f} [{low:.3f}, {high:.3f}]"
        rows.append([NAMES[name], reward, failed, score, ", ".join(f"`{alarm}`" for alarm in run["alarms"])])
    header = ["sums, 40 steps of the starter", "reward", "failed", "held-out score in the sound environment", "alerts"]
    n_raised = sum(map(bool, clean["alarms"].values()))
    chance = f"Ten runs in which one answer in ten fails by chance raised {n_raised or 'none'} of these alerts."
    fill_docs("failed_reward", "\n\n".join([table(header, rows), chance, conditions]), PAGE)


if __name__ == "__main__":
    main()
