"""`sottovoce rehearse`: settings chosen on a stand-in, before any private row is touched.

`standin` holds the rows that stand for the clients' and the federation made of them; `space` what
is searched, `search` in which order, with a trial for each; `prediction` what one more run would
reach; `rehearsing` all of it with its reasons and costs; `page` the page.
"""
