"""The wire to SGLang: requests, answers, the transport, and whose fault a failure is."""
