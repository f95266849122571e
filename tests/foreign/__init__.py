"""Runs the API tests of vLLM, SGLang and llama.cpp against a Coterie server.

Their files are read from checkouts that whoever runs this has fetched; nothing of theirs is kept
here. What stands in for their own servers and packages is in this folder.
"""
