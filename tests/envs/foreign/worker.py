"""A framework in one file: its tasks are sums, and its program asks the policy over HTTP, as its rows say."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def load(settings):
    if settings["name"] != "sums":
        raise LookupError(f"there is no environment {settings['name']!r}: there is sums")
    print("output of a framework")
    rows = [
        {"id": f"sums/{number}", "prompt": f"{number} + 1", "answer": str(number + 1), "does": settings["does"]}
        for number in range(settings["count"])
    ]
    return {"rows": rows, "version": "sums 1", "description": "Adds numbers."}


def ask(call, messages):
    body = json.dumps({"model": call["model"], "messages": messages, "tools": [TOOL]}).encode()
    request = urllib.request.Request(f"{call['url']}/chat/completions", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


async def run(call):
    row, does = call["row"], call["row"]["does"]
    assert sys.stdin.read() == ""
    if does == "die":
        os.abort()
    if does == "raise":
        raise RuntimeError("a bug\nof the framework")
    if does == "fail":
        return {"failure": {"kind": "verifier", "message": "no file", "retryable": True}}
    if does == "leave":
        subprocess.Popen(["setsid", "sleep", "4321"])  # noqa: ASYNC220
        folder = f"{tempfile.mkdtemp()}/{('a/' * 1200) if row['answer'] == '1' else ''}"
        subprocess.run(["sh", "-c", 'mkdir -p "$0"; chmod 0 "$0"', folder], check=True)  # noqa: ASYNC221
    messages = [{"role": "user", "content": row["prompt"]}]
    if does == "hurry":
        threading.Thread(target=ask, args=(call, messages), daemon=True).start()
        await asyncio.sleep(0.5)
        return {"reward": 0.25, "rewards": {}, "metrics": {}, "truncated": True}
    answer = await asyncio.to_thread(ask, call, messages)
    if does == "wait":
        await asyncio.sleep(1000)
    if does == "block":
        time.sleep(1000)  # noqa: ASYNC251 - a program that blocks
    turns = 1
    while answer.get("tool_calls") and turns < 3:
        messages += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": row["answer"]}]
        answer = await asyncio.to_thread(ask, call, messages)
        turns += 1
    reward = {"nan": float("nan"), "none": None}.get(does, float(row["answer"] in answer["content"]))
    return {"reward": reward, "rewards": {"right": reward}, "metrics": {"turns": turns}, "truncated": does == "cut"}
