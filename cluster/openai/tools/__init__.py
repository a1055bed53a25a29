"""Tool calls: which formats models write them in, reading them out of text as it comes, and what requests may ask.

`events` what a parsed answer consists of · `text_stream` text in pieces, read as one · `sink` where readers put what
they found · `json_text` where a JSON value ends · `styles` one reader for each format · `detect` which format a chat
template asks for.
"""
