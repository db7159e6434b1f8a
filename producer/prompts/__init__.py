"""Read prompts: from bytes of any compression to checked requests, each line with its verdict.

    decompress  what kind of file it is, by content       lines       bytes to lines
    rows        a line to a request                       broken      why a line is no JSON
    chat        messages and stored conversations         parameters  a row's own parameters
    reader      a file to rows and rejects                verdicts    words for what is wrong

Rules: a row is refused where no server could answer it well, or where it would harm others (a
local address, streaming, another model); what only the server can judge passes unchanged. One
message for a file that is no JSON lines. Text never reaches a message.
"""
