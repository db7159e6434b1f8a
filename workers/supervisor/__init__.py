"""One SGLang server launched, watched, ended and launched anew: `workers serve`."""
