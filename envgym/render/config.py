"""Settings of rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from envgym.errors import ConfigError, did_you_mean, reported_as
from envgym.limits import limits
from envgym.settings import Settings

from .chat import RENDERING

RenderKind = Literal["auto", "chat", "text", "raw"]
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of templates that the conversation sets."""


class RenderConfig(Settings):
    """The rendering of conversations as tokens. `render=KIND` sets the kind alone."""

    kind: RenderKind = "auto"
    """`chat`: the tokenizer's chat template; `text`: plain text with the speakers' names; `raw`: the texts alone,
    concatenated; `auto`: the chat template if there is one, else `text`."""
    template: str | None = None
    """A chat template in place of the tokenizer's: a file, or the template's own text (Jinja)."""
    template_kwargs: dict[str, Any] = Field({})
    """Values of the template's own variables (`render.template_kwargs.enable_thinking=false`)."""
    image_size: dict[str, PositiveInt] | None = Field(None, min_length=1)
    """The size at which images are processed, in the terms of the model's processor, which has a default. For Qwen's
    models the limits of an image's pixels: `{shortest_edge: 3136, longest_edge: 200704}`."""
    keep_thoughts: bool = False
    """Keep the thoughts of earlier turns in the prompt where the template drops them, so that an episode stays one
    token sequence."""

    @model_validator(mode="before")
    @classmethod
    def _from_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    def set_template(self, tokenizer: Any) -> None:
        """Give `tokenizer` the template, with the variables in it, so that they are saved with the model. Raises
        `ConfigError` for a file that cannot be read or is no template, and for a variable that it does not have."""
        if self.template is not None and ("{{" in self.template or "{%" in self.template):
            tokenizer.chat_template = self.template
        elif self.template is not None:
            try:
                tokenizer.chat_template = Path(self.template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"render.template: {self.template} cannot be read ({reason})") from None
        if self.template is None and not self.template_kwargs:
            return
        if not isinstance(tokenizer.chat_template, str):
            raise ConfigError("render.template_kwargs: this tokenizer has no chat template, or several")
        names = _variables(tokenizer.chat_template) - {*RESERVED}
        if unknown := [name for name in self.template_kwargs if name not in names]:
            hint = did_you_mean(unknown[0], names)
            raise ConfigError(f"render.template_kwargs: the chat template has no variable {unknown[0]!r}.{hint}")
        tokenizer.chat_template = _with_values(tokenizer.chat_template, self.template_kwargs)


def _variables(template: str) -> set[str]:
    """The variables that a template takes. Raises `ConfigError` for a text that is no template."""
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        with reported_as(ConfigError, "the chat template cannot be compiled"), limits(*RENDERING):
            environment = _compile_jinja_template(template).environment
            names = meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is not valid Jinja (line {error.lineno}: {error.message})") from None
    return {*names, *re.findall(PREFIX.format(name=r"(\w+)"), template)}


PREFIX = "{{%- if {name} is not defined %}}"
"""The beginning of a value that `_with_values` has written."""


def _with_values(template: str, values: Mapping[str, Any]) -> str:
    """A template that sets variables itself, unless its caller does."""
    lines = [  # templates are read with `trim_blocks`, which drops the line breaks
        f"{PREFIX.format(name=name)}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n"
        for name, value in values.items()
    ]
    return "".join(lines) + template


def _literal(value: Any) -> str:
    """A value as Jinja writes it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(str(key))}: {_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
