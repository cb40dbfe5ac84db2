r"""Programs as agents: each asks the policy in the dialect of a library, and prints the answer. Start one so:

envgym rollout --env math_verify --model starter --out chat.jsonl agent=external \
    agent.command="python examples/asks.py chat"
"""

import json
import os
import sys

from anthropic import Anthropic
from openai import OpenAI


def chat(question):
    completion = OpenAI().chat.completions.create(model="policy", messages=question, stop=["\n\n"])
    return completion.choices[0].message.content


def responses(question):
    return OpenAI().responses.create(model="policy", input=question).output_text


def messages(question):
    with Anthropic().messages.stream(model="policy", max_tokens=256, messages=question) as stream:
        return "".join(stream.text_stream)


def own_key(question):
    """A program that sends the key of another service."""
    client = OpenAI(base_url=os.environ["ENVGYM_SESSION_URL"], api_key="sk-of-another-service")
    return client.chat.completions.create(model="policy", messages=question).choices[0].message.content


ask = {"chat": chat, "responses": responses, "messages": messages, "own_key": own_key}[sys.argv[1]]
print(ask(json.load(sys.stdin)["messages"]))
