"""An environment: a prompt, one answer, a reward. See docs/environments/environments.md of envgym."""

import envgym


def problems(split):
    """The tasks of `train` and of `test`, which must not overlap. Or leave this out and give data.path=FILE."""
    for a in range(10, 100):
        for b in range(10, 100):
            if (split == "test") == ((a + b) % 10 == 7):  # hold a tenth out
                yield {"prompt": f"What is {a} + {b}?\nPut the final answer in \\boxed{{}}.", "answer": str(a + b)}


@envgym.reward(tasks=problems)
def new_environment(completion, answer):
    """Sums of two numbers."""
    return float(completion.strip().endswith(f"\\boxed{{{answer}}}"))
