"""Trains adapters for a served base model with torch only, without peft."""
