"""What can be told of a prompt: instruction, language, code, task type; and conditions over it."""
