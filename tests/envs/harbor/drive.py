"""Runs jobs with Harbor's worker in Harbor's interpreter, which is imported once: PYTHON drive.py WORKER.py.

A job is a line of JSON, {"settings": {…}, "calls": [{…}], "folder": FOLDER}, and runs in a process of its own, with its
temporary files in the folder. The answer is a line, {"loaded": {…}, "results": [{…}]} or {"mistake": "…"}.
"""

import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import traceback

answers = os.dup(1)
os.dup2(2, 1)  # Harbor's output must not mix with the answers
spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = sys.modules["worker"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


def answer(job):
    os.environ["TMPDIR"] = tempfile.tempdir = job["folder"]
    try:
        loaded = worker.load(job["settings"])
    except (LookupError, ValueError, ImportError, OSError) as error:
        return {"mistake": str(error)}
    results = []
    for call in job["calls"]:
        row = loaded["rows"][call.pop("row", 0)]
        results.append(asyncio.run(worker.run({"row": row, "seed": 0, "model": "policy", **call})))
    return {"loaded": loaded, "results": results}


for line in sys.stdin:
    process = os.fork()
    if process == 0:
        try:
            text = json.dumps(answer(json.loads(line)))
        except BaseException:
            text = json.dumps({"crash": traceback.format_exc()})
        os.write(answers, text.encode() + b"\n")
        os._exit(0)
    os.waitpid(process, 0)
