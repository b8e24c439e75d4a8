"""`sottovoce rehearse`: settings chosen on a stand-in, before any private row is touched.

`standin` makes the rows that stand for the clients' and a federation of them, `space` says which
settings are searched, `search` tries them, `rehearsing` predicts what one more run would reach and
gives reasons and costs, and `page` renders the page.
"""
