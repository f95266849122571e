"""The official Anthropic client: counts a prompt's tokens, sends a message, reads a stream.

python examples/clients/anthropic_messages.py [MODEL]
"""

import os
import sys

from anthropic import Anthropic

url = os.environ.get("COTERIE_BASE_URL", "http://127.0.0.1:8000")
client = Anthropic(base_url=url, api_key=os.environ.get("COTERIE_API_KEY", "none"))
model = sys.argv[1] if len(sys.argv) > 1 else "auto"
messages = [{"role": "user", "content": "What is the capital of France?"}]
# fields for which this version of the client has no argument
greedy = {"temperature": 0}

counted = client.messages.count_tokens(model=model, messages=messages)
print("prompt:", counted.input_tokens, "tokens")

answer = client.messages.create(
    model=model,
    messages=messages,
    system="Answer in one sentence.",
    max_tokens=24,
    extra_body=greedy,
)
print("answer:", answer.content[0].text, f"({answer.usage.output_tokens} tokens)")

print("stream: ", end="")
with client.messages.stream(
    model=model, messages=messages, max_tokens=24, extra_body=greedy
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print(f" ({stream.get_final_message().stop_reason})")
