"""One SGLang server: what it is and says of itself, and whether work goes on in it."""
