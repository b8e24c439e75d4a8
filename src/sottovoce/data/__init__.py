"""The samples, and which client holds which of them.

`datasets` reads the data sets, `census` turns tables into features, `partition` deals rows to
clients. Nothing here draws privacy noise, and nothing here looks at the values of a sample to
scale it: a scale taken from the data would be a release that no budget paid for.
"""
