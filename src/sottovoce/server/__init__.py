"""What a server decides; it never sees a sample of a client or a value without noise.

`federation` turns a plan into clients, model, schedule and guarantee. `rounds` holds the loop of
Algorithms 1 and 2 over an `Engine`. `coordinator` is the engine whose clients are real, with
`members` (who takes part) and `checks` (is this an upload?). From outside use `federation.build`,
`rounds.play_rounds` and `coordinator.conduct`.
"""
