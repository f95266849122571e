from coterie_client import ExpertClient

client = ExpertClient(api_key="...")

# Simple inference
result = client.infer(
    prompt="Parse this JSON and extract fields",
    body='{"name": "Alice", "age": 30}',
    temperature=0.2
)

print(result.text)
print(f"Used experts: {result.experts_used}")
print(f"Latency: {result.latency_ms}ms")

# Streaming
for chunk in client.infer_stream(prompt="Write a story about..."):
    print(chunk.text, end="", flush=True)
