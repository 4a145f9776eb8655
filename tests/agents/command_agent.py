"""An agent without any package: one call of the model by urllib, its reward on stdout. It leaves a daemon behind.

python command_agent.py [SECONDS]        to wait before the call
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request

row = json.load(sys.stdin)
subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=subprocess.DEVNULL)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "any", "messages": row["prompt"]}).encode(),
    {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
)
with urllib.request.urlopen(request, timeout=120) as response:
    answer = json.load(response)["choices"][0]["message"]["content"] or ""
print("a line that is no result")
print(json.dumps({"reward": (len(answer) * 7 % 10) / 10, "length": len(answer)}))
