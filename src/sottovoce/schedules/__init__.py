"""When rounds happen, what they cost, and what the server makes of them: numbers, no samples.

`base` is the contract (`Progress` in, `Round` or stop out); `fixed`, `discounted` (CRD) and
`decaying` keep it. `cohort` picks clients, `pricing` turns a horizon and a tank into noise,
`bound` holds Theorems 2 and 3, `aggregate` the mean of uploads, `optimizer` the server's step
after the noise, and `calibrate` the command of that name.
"""
