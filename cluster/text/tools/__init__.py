"""Tool calls: the tools of a request, the formats in which models write calls, and parsing them from text as it comes.

`tool_use` the tools of a request · `grammar` grammars for answers that are calls · `events` the parts of a parsed
answer · `text_stream` text in pieces, read as one · `sink` where parsers put their events · `styles` one parser per
format, and which format a chat template shows · `generic` how tools are shown if the template cannot show them.
"""
