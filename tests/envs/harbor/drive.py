"""Runs calls of Harbor's worker in Harbor's interpreter, one after another: PYTHON drive.py WORKER.py FOLDER.

Reads {"settings": {…}, "calls": [{…}]} on standard input and prints {"loaded": {…}, "results": [{…}]} or
{"mistake": "…"}. FOLDER is for temporary files.
"""

import asyncio
import importlib.util
import json
import os
import sys
import tempfile

spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = sys.modules["worker"] = importlib.util.module_from_spec(spec)
answers = os.dup(1)
os.dup2(2, 1)  # Harbor's output must not mix with the answer
os.environ["TMPDIR"] = tempfile.tempdir = sys.argv[2]
job = json.load(sys.stdin)
try:
    spec.loader.exec_module(worker)
    answer = {"loaded": worker.load(job["settings"]), "results": []}
    with open(answer["loaded"]["rows"]) as file:
        rows = answer["loaded"]["rows"] = [json.loads(line) for line in file]
    for call in job["calls"]:
        row = rows[call.pop("row", 0)]
        answer["results"].append(asyncio.run(worker.run({"row": row, "seed": 0, "model": "policy", **call})))
except (LookupError, ValueError, ImportError) as error:
    answer = {"mistake": str(error)}
os.write(answers, json.dumps(answer).encode())
