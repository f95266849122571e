"""Whether the router chooses the right expert for a prompt, and how long it takes."""
