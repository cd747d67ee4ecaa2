"""From a body to requests of the engine and from its tokens to answers: what the endpoints of one server share.

Way in: `state.ServerState`. The routes and `elastic.server.app` import it; it imports the engine's protocol.
"""
