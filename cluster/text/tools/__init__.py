"""Tool calls: what requests may ask, which formats models write calls in, and reading them out of text as it comes.

`tool_use` the tools of a request · `grammar` answers that are calls · `events` what a parsed answer consists of ·
`text_stream` text in pieces, read as one · `sink` where readers put what they found · `styles` one reader for each
format, and which of them a chat template asks for · `generic` what stands for it where the template shows no tools.
"""
