"""Whether an attention is right, where it departs from the textbook, and which mistake that is.

To read it from call to verdict: `diagnose` asks the questions in order. `door` finds how the
function is called (`call`), `judge` whether its answers to the problems of `survey` are those of
`task`, `lines` what its lines make (`trace`), and `verdict` says it with the words of `mistakes`.
For a function in another process, `isolation` starts the `process.supervisor`, that starts the
`call.worker`; `call.remote` and `process.protocol` check what they send.
"""
