"""A specialist on another server: any that speaks OpenAI's API, reached over HTTP."""
