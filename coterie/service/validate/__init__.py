"""Whether an answer is what was asked for: validators and the sandbox they run in."""
