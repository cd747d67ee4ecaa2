"""Calls of tools in the text of answers: what the formats that models write have in common, and each of them.

Way in: `formats.TOOL_FORMATS`. Pure: text goes in by pieces, content and calls come out.
"""
