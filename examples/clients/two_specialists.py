"""Asks two specialists of one server at the same time; start the server with two_specialists.toml.

python examples/clients/two_specialists.py
"""

import os
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

url = os.environ.get("COTERIE_BASE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("COTERIE_API_KEY", "none"))


def ask(name: str) -> str:
    message = {"role": "user", "content": "What is the capital of France?"}
    answer = client.chat.completions.create(
        model=name, messages=[message], max_tokens=16, temperature=0
    )
    return f"{answer.model}: {answer.choices[0].message.content}"


for entry in client.models.list():
    print("serves", entry.id, "with a context of", entry.max_model_len)
with ThreadPoolExecutor(2) as pool:
    for line in pool.map(ask, ["chat", "batch"]):
        print(line)
