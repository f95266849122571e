"""Text to tokens and back: tokenizers, chat templates, and how a model writes calls of tools."""
