"""What NeMo-Gym's verdicts say beside the reward: that the sample is void, and which numbers are metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from envgym.errors import InvalidOutcome

FAILURE_CLASS = "_ng_failure_class"
"""What an agent server puts into the row of a rollout that failed, and a server's own guards into an answer in which a
judge failed, beside a reward of zero."""
PASSING = ("transport_", "provider_", "session_", "judge_failed")
"""How kinds of failure begin that another try may not meet."""


def check_valid(answer: Mapping[str, Any], route: str) -> None:
    """Raise `InvalidOutcome` where an answer says that the sample counts for nothing, whatever its reward."""
    masked, kind = answer.get("mask_sample"), answer.get(FAILURE_CLASS) or answer.get("failure_kind")
    # A kind alone voids the sample; with `mask_sample` false it is a remark on one that was measured all the same.
    if masked is True or answer.get(FAILURE_CLASS) or (kind and masked is None):
        said = answer.get("failure_reason") or answer.get("_ng_failure_judge_error") or answer.get("error_message")
        reason = " ".join(str(said or "the server says that it counts for nothing").split())
        kind = re.sub(r"\W+", "_", str(kind or "masked"))[:60]
        raise InvalidOutcome(
            kind,
            f"/{route}: {reason[:300]}",
            retryable=kind.startswith(PASSING) and not answer.get("_ng_failure_terminal"),
        )


def number(value: Any) -> float | None:
    """A finite number as JSON has it, truth among them; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None
