"""Data of tests that are not run."""

TEST_RERANK_QUERY_DOCS: list[object] = []
