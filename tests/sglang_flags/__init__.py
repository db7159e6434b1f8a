"""The arguments that each version of SGLang takes, as its own parser has them.

`make wheels` downloads the wheels of `VERSIONS`, without what they depend on, and compares each
one's parser with the record, `options.jsonl`; with `ARGS=--write` it writes the record anew. The
tests of launch lines parse with what the record says, so that no wheel need be there.
"""

VERSIONS = (
    "0.5.6.post2",
    "0.5.7",
    "0.5.8.post1",
    "0.5.9",
    "0.5.10.post1",
    "0.5.12.post1",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15.post1",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.22",
    "0.5.23",
)
