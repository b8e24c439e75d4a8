"""The simulator: whole federations on one machine, one compiled round for a batch of runs.

`round`   the arrays: one round of every run in the batch, compiled
`course`  the host's side of one run: whom to ask, what it costs, when to stop
`interrupts`  Ctrl-C between rounds, never inside one
`batch`   a batch of runs as arrays; `packed`: what it asks for in a round, as one array
`table`   a batch of runs: who sits where, and the books after a round
`loop`    round after round for a batch of runs
`ahead`   the same on an accelerator, in stretches that begin before losses are known
`stretch` several rounds in one launch, compiled
`streamed`    a round over rows that do not fit in memory, block by block
`run`     `simulate` and `resume`, and what is kept of a run
`scoring` the first model, and how good a model is
`finishing`   what the server makes of averaged uploads
`done`    what is told of a round when it is over
`given`   arrays and models from Python, brought into agreement with the plan
`many`    `simulate_many`: many plans, many seeds
"""
