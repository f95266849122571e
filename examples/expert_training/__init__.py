"""Training adapters for a served base model with torch alone: no peft."""
