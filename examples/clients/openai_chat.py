"""The official OpenAI client: a chat, a stream, and an answer that follows a JSON schema.

python examples/clients/openai_chat.py [MODEL]
"""

import json
import os
import sys

from openai import OpenAI

url = os.environ.get("COTERIE_BASE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("COTERIE_API_KEY", "none"))
model = sys.argv[1] if len(sys.argv) > 1 else "auto"
print("models:", ", ".join(entry.id for entry in client.models.list()))

question = {"role": "user", "content": "What is the capital of France?"}
answer = client.chat.completions.create(
    model=model, messages=[question], max_tokens=24, temperature=0
)
print("answer:", answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model, messages=[question], max_tokens=24, temperature=0, stream=True
)
print("stream:", "".join(c.choices[0].delta.content or "" for c in stream if c.choices))

person = {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "maximum": 99}}
schema = {"type": "object", "properties": person, "required": ["name", "age"]}
schema["additionalProperties"] = False
structured = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe a person as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    max_tokens=60,
)
fields = json.loads(structured.choices[0].message.content)
print("json:", fields["name"], fields["age"])
