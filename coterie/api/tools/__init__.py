"""Tools in requests and answers, for every dialect."""
