"""Which mistake is in an attention: put probes to a function, match its outputs with a catalogue.

To read it from call to verdict: `verdict` asks the questions in order. `reading` and `forms` find
out what can be known without a call (`forms.inspection`); `calls.convention_search` how to call;
`calls.under_test` keeps the answers, which `calls.calling` gets for a probe with `calls.arguments`,
through `process.running` in the function's process. `judging.matching` compares with `mistakes`;
the rest of `judging` adds what a `result` tells. For a function in another process, `isolation`
starts the `process.supervisor`, that starts the `worker`, and `protocol` checks what they send.
"""
