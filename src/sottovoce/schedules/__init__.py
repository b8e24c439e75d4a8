"""What happens when: schedules, cohorts, and the bound that says how many rounds are best.

`schedule`    the contract: `Progress` in, `Round` or stop out
`fixed`       `FixedRounds`: T rounds (the paper's UDP, Algorithm 1)
`discounted`  `DiscountedRounds`: T shrinks when learning stops paying (CRD, Algorithm 2)
`decaying`    `DecayingNoise`: σ falls linearly until the budget is gone (Lei's baseline)
`cohort`      who takes part in a round, and how many turns a client should plan for
`turn`        what a client makes of a round: horizon and tank become its noise
`bound`       Theorems 2 and 3: the convergence bound and the best number of rounds
"""
