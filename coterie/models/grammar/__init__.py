"""Grammars that constrain answers, over a tokenizer's vocabulary, and checks that they work."""
