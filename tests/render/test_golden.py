"""What three families' conversations look like, written by hand: the text that the policy reads, turn by turn."""

from envgym.types import Message, Observation, TextPart, ToolCall, ToolSpec

ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})


def told(*messages, **fields):
    return Observation(messages=tuple(messages), **fields)


def result(text, call):
    return Message("tool", (TextPart(text),), tool_call_id=call.id, name=call.name)


class Player:
    """Plays a policy's turns and keeps the text it has in front of it."""

    def __init__(self, renderer):
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self.dialogue = renderer.dialogue()
        self.row = []

    def begin(self, observation):
        self.row = self.dialogue.start(observation)
        return self.text

    def says(self, text):
        """The policy writes this text, special tokens as such."""
        ids = self.renderer.encode(text)
        self.row += ids
        return self.dialogue.add_policy_turn(ids)

    def reads(self, observation):
        """What the environment's answer adds to the row; the row itself where it is a new one."""
        extension = self.dialogue.add_observation(observation)
        self.row = extension.token_ids if extension.fork else self.row + extension.token_ids
        return self.tokenizer.decode(extension.token_ids), extension.fork

    @property
    def text(self):
        return self.tokenizer.decode(self.row)


def test_chatml(chat):
    player = Player(chat("starter", "chatml", "<|im_end|>"))
    assert player.begin(told(Message("system", "Be brief."), Message("user", "12 + 34?"))) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12 + 34?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert player.says("46<|im_end|>").text == "46"
    # The line break after the end of the turn is the template's: the policy never says it.
    added = "\n<|im_start|>user\nTwice that?<|im_end|>\n<|im_start|>assistant\n"
    assert player.reads(told(Message("user", "Twice that?"))) == (added, False)
    assert player.says("nine").text == "nine"  # cut
    added = (
        "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>user\nPlease.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert player.reads(told(Message("user", "Go on."), Message("user", "Please."))) == (added, False)
    assert player.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12 + 34?<|im_end|>\n<|im_start|>assistant\n"
        "46<|im_end|>\n<|im_start|>user\nTwice that?<|im_end|>\n<|im_start|>assistant\n"
        "nine<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>user\nPlease.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    roles = [message.role for message in player.dialogue.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "user"]


QWEN3_TOOLS = """<|im_start|>system
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", \
"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
"""


def test_qwen3(chat):
    """Thoughts stay while the policy waits for a tool, and are dropped when the user speaks again."""
    player = Player(chat("starter", "qwen3", "<|im_end|>"))
    question = "<|im_start|>user\n12 + 34?<|im_end|>\n<|im_start|>assistant\n"
    assert player.begin(told(Message("user", "12 + 34?"), tools=(ADD,))) == QWEN3_TOOLS + question
    calls = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
    said = player.says(f"<think>\nI add.\n</think>\n\n{calls}<|im_end|>")
    assert said.text == f"<think>\nI add.\n</think>\n\n{calls}"
    assert said.tool_calls == (ToolCall("call00000", "add", {"a": 12, "b": 34}),)
    added = "\n<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert player.reads(told(result("46", said.tool_calls[0]))) == (added, False)
    assert player.says("<think>\nDone.\n</think>\n\nIt is 46.<|im_end|>").text.endswith("It is 46.")
    forked = (
        f"{QWEN3_TOOLS}{question}{calls}<|im_end|>"
        "\n<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "It is 46.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert player.reads(told(Message("user", "Sure?"))) == (forked, True)
    assert player.says("Yes.<|im_end|>").text == "Yes."
    added = "\n<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\n"
    assert player.reads(told(Message("user", "Good."))) == (added, False)


def test_llama3(chat):
    """A call is bare JSON; the template writes one a turn, but a policy that wrote two is not put right."""
    player = Player(chat("tekken", "llama3_1"))
    text = player.begin(told(Message("user", "12 + 34?"), tools=(ADD,)))
    assert text.startswith("<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n")
    assert text.endswith("\n}\n\n12 + 34?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    [call] = player.says('{"name": "add", "parameters": {"a": 12, "b": 34}}<|eot_id|>').tool_calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 12, "b": 34}, "")
    added = (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"46"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
    assert player.reads(told(result("46", call))) == (added, False)
    calls = player.says(
        '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters":{"a":3,"b":4}}<|eot_id|>'
    ).tool_calls
    assert [call.arguments for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert len({call.id for call in (call, *calls)}) == 3
    added = added.replace("46", "3").partition("<|start_header_id|>assistant")[0] + added.replace("46", "7")
    assert player.reads(told(result("3", calls[0]), result("7", calls[1]))) == (added, False)
    player.says("Sums: 46, 3 and 7")  # cut
    added = (
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nTotal?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert player.reads(told(Message("user", "Total?"))) == (added, False)
