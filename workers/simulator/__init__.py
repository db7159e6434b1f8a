"""A stand-in for SGLang servers, at the wire: real sockets, no GPU, no model.

One process and one event loop hold N servers, a port each. They answer as recorded from real
servers (bodies, headers, errors, metrics, log lines, in the shapes of the version asked for),
at the pace of a throughput model or of a latency distribution, and fail on request.

    wire      bytes <-> requests and replies; keep-alive as uvicorn keeps it
    server    one port: routes, and the life of one request from arrival to answer
    checks    what the real server refuses, and with which words (errors)
    engine    slots, FIFO queue, processor sharing, the mamba and KV pools; a server restarts with
              a fresh one
    answers   what a finished request gets back; every answer holds the hash of its request
    faults    what was armed, and whom it hits; control arms it over HTTP
    journal   one line at a request's begin and one at its end; log reads them back
    launch    starts all this as a process of its own, for tests and benchmarks
    launched  one server as SGLang's own command line starts it, with a `scheduler` child process;
              sglang_flags has the command line of each version
    environment  a python whose `sglang` is that, for whoever starts servers

What tests may rely on:
    - An answer's text starts with `sim:<hash> `, the hash of its own request (`hashing`), so an
      answer that reached the wrong prompt is found.
    - The same request body gives the same text and length; rid and model do not matter.
    - A request's `begin` line is on disk before its answer is sent, and its `end` line before the
      answer leaves; a SIGKILL loses no request that anyone saw answered.
    - At most `cap` requests run at once in a server; the rest wait in order of arrival.

Decisions:
    - The HTTP parser is written by hand: what stands beside a benchmark must cost less than what
      is measured, and a general one costs more than the rest of a request together.
    - Processor sharing is one number per server, the work that each running request has had since
      the start (virtual time). A request ends when it passes the number drawn for it, so a change
      of the batch costs one heap operation, whatever runs. Latency distributions are the same with
      a pace of one second per second.
    - A launched server takes SGLang's flags, and all else from the variables of `workers simulate`
      (HEADRACE_SIM_SPEED …): who starts it can not tell it from a real one.
    - Not simulated: streaming, log-probabilities, tool calls, LoRA, prefill time, speculation.
"""
