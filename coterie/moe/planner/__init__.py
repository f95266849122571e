"""The planner: what each strategy would give on this machine, before anything is loaded."""
