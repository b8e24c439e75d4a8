"""`sottovoce rehearse`: settings chosen on a stand-in, before any private row is touched.

`standin`    the rows that stand for the clients': named, a file, digits drawn anew, or a schema's
`pictures`   digits drawn anew: shifted, turned, scaled, thicker or thinner
`rows`       synthetic rows of a public schema
`scale`      the plan's federation with as many rows as there are, its noise the real one
`space`      what is searched: one line a key
`search`     which settings are tried in which order
`trials`     whole federations on the stand-in, each written down as soon as it is done
`theorem`    the best T by Theorem 2, with constants estimated on the stand-in
`cost`       what it costs in privacy, and on whose word
`prediction` what one more run would reach on the stand-in
`reasons`    why each value was chosen, and the plan with these reasons as comments
`page`       the page
`rehearsing` all of it: `rehearse`, and what the command prints
"""
