"""The dialect of Ollama: chat, generate, and what models there are."""
