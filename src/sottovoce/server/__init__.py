"""What the server makes of uploads. It never sees samples or un-noised values.

`registry`  who the clients are, as they have said themselves
`roll`      who takes part in a run, by which route, and who is not asked any more
`checks`    is this an upload?
`weights`   how much each upload counts, and how much at most
`average`   how uploads become one: their weighted mean, or one that few cannot pull away
`finish`    what is made of that mean, and which model is handed out
"""
