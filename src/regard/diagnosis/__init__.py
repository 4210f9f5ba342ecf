"""Which mistake is in an attention: put probes to a function, match its outputs with a catalogue.

To read it from call to verdict: `verdict` asks the questions in order. `inspection` and `signature`
find out what can be known without a call; `convention_search` how to call; `under_test` keeps the
answers, which `calling` gets for a probe (`probe`, `probes`) with `arguments`, through `running` in
the function's process. `matching` compares with `mistakes`; `examples`, `robustness`, `properties`
and `observations` add what a `result` tells. For a function in another process, `isolation` starts
the `supervisor`, that starts the `worker`, and `protocol` checks what they send.
"""
