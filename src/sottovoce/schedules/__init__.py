"""When rounds happen, what they cost, and how the server combines uploads: no samples here.

`base` is the interface (`Progress` in, `Round` or stop out); the schedules of `algorithms`
implement it, beside Theorems 2 and 3. `pricing` picks clients and turns a horizon and a tank into
noise, `aggregate` holds the mean of uploads, `optimizer` the server's step after the noise, and
`calibrate` the command of that name.
"""
