"""From a parsed request to its events: plan, admit, submit, finish; jobs and records."""
