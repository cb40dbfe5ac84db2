"""An MCP server without a library: `mcp_stranger.py TOOLS RESULT` lists the tools and answers each call so, in JSON."""

import json
import sys

TOOLS, RESULT = map(json.loads, sys.argv[1:])

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    answers = {
        "initialize": lambda params: {
            "protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
            "serverInfo": {"name": "stranger", "version": "1"},
        },
        "tools/list": lambda params: {"tools": TOOLS},
        "tools/call": lambda params: RESULT,
    }  # fmt: skip
    result = answers[request["method"]](request.get("params"))
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
