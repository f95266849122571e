"""What can be told of a prompt: its instruction, its language, whether it holds code."""
