"""Receipts: made when a request is admitted, completed at its end, kept on disk, made again."""
