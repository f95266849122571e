"""Tools in requests and answers, whichever dialect they came in."""
