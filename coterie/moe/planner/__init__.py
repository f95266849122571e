"""The planner: how fast each strategy would be on this machine, before anything is loaded."""
