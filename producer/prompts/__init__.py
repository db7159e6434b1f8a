"""Read prompts: from bytes of any compression to checked requests, each line with its verdict.

    decompress  what kind of file it is, by content       lines       bytes to lines
    parquet     a Parquet file to rows                    columns     Arrow's values to JSON's
    rows        a row to a request                        broken      why a line is no JSON
    chat        messages and stored conversations         parameters  a row's own parameters
    reader      a file to rows and rejects                verdicts    words for what is wrong
    addresses   what a row may have a server open

Rules: a row is refused where no server could answer it well, or where it would harm others (a
local address, streaming, another model); what only the server can judge passes unchanged. One
message for a file that is no JSON lines. Text never reaches a message.

Of a member that an object has twice the last one counts, as in every reader of JSON that follows;
to refuse it would cost a second parser. A number keeps its value, an id its spelling too.

Parquet: a row's number stands for its line; a null, at the top or in a struct, is an absent member
(`columns` tells what becomes of each type). It is read from a file that can be sought in; a pipe's
is put on disk first.
"""
