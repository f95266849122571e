"""Facts about a prompt: instruction, language, code, task type; and conditions over them."""
