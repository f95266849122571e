"""Chooses a prompt's specialist: declared intents, structures in the text, a trained router."""
