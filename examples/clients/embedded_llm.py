"""A model inside this program: no server and no other process.

python examples/clients/embedded_llm.py [MODEL]
"""

import sys

from coterie import LLM

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    # several prompts run as one batch
    prompts = ["The capital of France is", "The capital of Italy is"]
    answers = llm.generate(prompts, max_tokens=8, temperature=0)
    for prompt, completion in zip(prompts, answers, strict=True):
        print("text:", prompt + completion.text)

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    print("chat:", llm.chat(messages, max_tokens=24, temperature=0).text)

    print("stream: ", end="")
    for delta in llm.stream(messages, max_tokens=24, temperature=0):
        print(delta.text, end="", flush=True)
    print()
