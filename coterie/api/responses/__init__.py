"""OpenAI's Responses API: its request bodies, stored answers, and how its answers are written."""
