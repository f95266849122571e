"""The task type of a prompt, and the conditions that packages bring."""
