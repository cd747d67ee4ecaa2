"""The endpoints: OpenAI's, the actions, the status. `elastic.server.app` imports them."""
