"""Numbers only: what a release costs, what a budget buys, and what an attacker can still do.

`gaussian` has μ ↔ (ε, δ) of the Gaussian mechanism; `budget` has `Budget` and the `Guarantee`
that we sign; `calibration` converts a budget into capacity; `sensitivity` and `grid` give Δ, in
floating point and in integers; `tank` is the accountant; `seeds` the tree of simulated
randomness. Only `secure_noise` draws privacy noise.
"""
