"""One SGLang server, now: whether it is there, whether work goes on in it, how fast."""
