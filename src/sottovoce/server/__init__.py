"""What the server makes of uploads. It never sees samples or un-noised values.

`weights`  how much each upload counts
`average`  the weighted mean of the uploads
"""
