"""What the shipped experts learn, and what they are judged by."""
