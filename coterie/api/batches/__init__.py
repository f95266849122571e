"""Files and batches on the APIs of both vendors."""
