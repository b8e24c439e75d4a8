"""The samples, and which client holds which of them.

`datasets` finds and reads the named datasets, `tables` reads your own and drafts a plan for it;
`partition` splits rows among clients, `federated` has a plan's clients with their rows, `streaming`
reads rows by slices; `files` writes files whole or not at all.
Nothing here draws privacy noise, and nothing scales a sample by values of the data: a scale taken
from the data would be a release that no budget paid for.
"""
