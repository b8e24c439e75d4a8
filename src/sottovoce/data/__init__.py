"""The samples, and which client holds which of them.

`datasets` finds and reads the data sets, `census` turns their tables into features, `tables`
reads your own; `partition` gives rows to clients, `federated` is a plan's clients with their
rows, `streaming` reads rows by slices; `draft` writes a plan for your table; `files` writes files
whole or not at all. Nothing here draws privacy noise, and nothing here looks at the values of a
sample to scale it: a scale taken from the data would be a release that no budget paid for.
"""
