"""Models: architectures, what they are built of, their texts and grammars."""
