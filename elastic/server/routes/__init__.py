"""The endpoints: OpenAI's, the actions, the status. `elastic.server.app` imports them."""

STATUS_VERSION = 2
"""Version of the document of `GET /elastic/status`; it grows when a key changes its meaning."""
