"""The outcomes of requests: a bounded log, and how often the answers of each adapter were valid."""
