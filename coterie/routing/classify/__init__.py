"""What kind of task a prompt is, and the rules that packages bring."""
