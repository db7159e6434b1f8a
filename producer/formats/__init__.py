"""What `producer export` can write: one module a format, each with its readers' rules.

A format sees every row twice: first in any order (`look`), to learn what a file of it must hold,
then in the order of the file (`write`). What it cannot hold is counted with its reason and told
to the caller, never dropped in silence. Samples and further choices are lines of their own where
a line is a conversation; where it is a request (`openai`) samples repeat its custom_id.

    jsonl         rows as the shards hold them, byte for byte
    openai        the output file of OpenAI's batches; --failures gets its error file
    specforge     SpecForge: id, conversations of role and content, tools as JSON text
    speculators   vLLM's speculators: the same, tool calls as lists; both: id, input_ids and
                  loss_mask of a run that keeps token ids
    sharegpt      from and value; reasoning and tool calls inside the text
    parquet       the columns of `common.store.columns`
"""

import importlib

from producer.formats.base import Format, Tally

FORMATS = ("jsonl", "openai", "specforge", "speculators", "sharegpt", "parquet")

__all__ = ["FORMATS", "Format", "Tally", "make_format"]


def make_format(name: str, *, token_ids: bool = True) -> Format:
    """Make what writes one file of a format.

    Args:
        name: One of `FORMATS`.
        token_ids: Where a format has a place for token ids in place of conversations, use it.

    Raises:
        UsageError: It needs a package that is not installed.
    """
    # Imported here: one is needed, and not the others' imports.
    made: Format = importlib.import_module(f"producer.formats.{name}").make()
    made.token_ids = token_ids
    return made
