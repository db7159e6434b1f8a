"""One SGLang server: what it says of itself, and whether work goes on in it."""
