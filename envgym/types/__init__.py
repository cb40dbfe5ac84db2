"""The data types that all parts share: tasks, observations, actions, episodes and their token sequences.

They are plain dataclasses without heavy imports. They cross process boundaries by pickle; episodes are saved as
rows of a Parquet file in the run folder.
"""

from .episodes import (
    Episode,
    Group,
    Limit,
    Objective,
    Outcome,
    Reward,
    Role,
    Row,
    SeedScope,
    Segment,
    Span,
    Status,
    Tally,
    Turn,
    VersionSpan,
    float_array,
    number_rows,
    timed,
    turn_node,
)  # fmt: skip
from .images import ImagePart, ImageSpan, PlacedImage
from .messages import (
    Action,
    Message,
    Observation,
    StopReason,
    Task,
    TextPart,
    ToolCall,
    ToolSpec,
    add_instruction,
    as_action,
    as_messages,
    as_observation,
    check_json,
    int_array,
    observed_messages,
    refuse_images,
)  # fmt: skip
from .pickles import pickle_by_values

pickle_by_values(Action, Message, Observation, Outcome, Tally, Task, TextPart, ToolCall, Turn, VersionSpan)

__all__ = [
    "Action", "Episode", "Group", "ImagePart", "ImageSpan", "Limit", "Message", "Objective", "Observation",
    "Outcome", "PlacedImage", "Reward", "Role", "Row", "SeedScope", "Segment", "Span", "Status", "StopReason",
    "Tally", "Task", "TextPart", "ToolCall", "ToolSpec", "Turn", "VersionSpan", "add_instruction", "as_action",
    "as_messages", "as_observation", "check_json", "float_array", "int_array", "number_rows", "observed_messages",
    "refuse_images", "timed", "turn_node",
]  # fmt: skip
