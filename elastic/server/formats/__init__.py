"""From answers to the JSON that OpenAI's clients read: whole, and as the chunks of a stream.

Way in: `completions.CompletionFormat`, `chat.ChatFormat`, `responses.ResponsesFormat`. Pure, but for new ids.
"""
