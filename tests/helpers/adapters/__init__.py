"""Adapters: directories and packages, good and hostile, profiles, and PEFT as the reference."""
