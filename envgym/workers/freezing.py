"""Parameters that keep their values, chosen by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from envgym.errors import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str], *, strict: bool) -> None:
    """Freeze the parameters in whose Hugging Face name one of the regular expressions is found.

    A tied head goes by both of its names: it is one tensor with the embeddings. Raises `ConfigError` where nothing
    is left to train and, if `strict`, where a pattern is found nowhere.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if re.search(pattern, name)]
        if strict and not found:
            examples = f"{named[0][0]} and {named[-1][0]}"
            raise ConfigError(f"learner.freeze: {pattern!r} is found in no name of a parameter (such as {examples})")
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(f"learner.freeze={list(patterns)} leaves nothing to train")
