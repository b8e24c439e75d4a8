"""`sottovoce rehearse`: settings chosen on a stand-in, before any private row is touched.

`standin` makes the rows that replace the clients' own and the federation on them; `space` says what
is searched, `search` in which order, and runs the trials. From outside use `rehearsing`: the
command and the function `rehearse`, with reasons, prediction, cost and page.
"""
