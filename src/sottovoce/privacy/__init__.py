"""Numbers only: what a release costs, what a budget buys, and what an attacker can still do.

`normal`       Φ, its inverse and Mills' ratio, to the last digits
`gaussian`     μ ↔ (ε, δ) of the Gaussian mechanism, and the attacker's view of μ
`budget`       `Budget(epsilon, delta)` and the `Guarantee` that we sign
`calibration`  how much fuel a budget is worth: `exact`, `zcdp`, `paper`
`sensitivity`  from the training recipe to Δ
`tank`         fuel in integer units: what is left, σ of the next release, check before spend
`moments`      Lemma 1 and the moment bound of the paper (Fig. 2)
"""
