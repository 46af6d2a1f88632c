"""The OpenAI-compatible server: one engine behind HTTP."""
