"""An OpenAI-compatible HTTP server in front of an engine. Needs the extra `serve`."""
