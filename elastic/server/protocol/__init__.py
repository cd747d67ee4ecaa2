"""What clients say and are told: the bodies of requests, field by field, and errors.

Way in: `completions.CompletionBody`, `chat.ChatBody`, `responses.ResponsesBody`, `tokens`, `errors.APIError`. The floor
of the server: it knows the engine's records only.
"""
