"""The native API with plain HTTP: an answer with its reasons, and a job that is answered later.

The SDKs do the same with types, streams and retries: docs/sdk.md.

python examples/clients/native_infer.py
"""

import os
import time

import httpx

url = os.environ.get("COTERIE_BASE_URL", "http://127.0.0.1:8000")
key = os.environ.get("COTERIE_API_KEY", "none")
client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120)

body = {"prompt": "Give the ISO date: the 3rd of March 2021", "max_tokens": 24, "temperature": 0}
reply = client.post("/v1/infer", json={**body, "explain": True}).raise_for_status().json()
print("answer:", reply["text"], "by", reply["experts_used"] or reply["model"])
print("why:", reply["task_type"], f"with confidence {reply['confidence']:.2f}")
print("took:", f"{reply['metrics']['total_latency_ms']:.0f} ms")

accepted = client.post("/v1/infer", json=body, headers={"prefer": "respond-async"})
job_url = accepted.raise_for_status().headers["location"]
while (job := client.get(job_url).raise_for_status().json())["status"] in ("queued", "processing"):
    time.sleep(0.2)
print("job:", job["status"], job["result"]["text"])
