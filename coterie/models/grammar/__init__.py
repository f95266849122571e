"""What an answer must look like, as a grammar over a tokenizer, and whether it can be enforced."""
