"""Questions asked of many runs.

`paper/` reproduces the figures, `audit/` attacks uploads and measures ε, `rehearsal/` chooses a
plan on stand-in data. From outside use `paper.reproduce`, `audit.auditing` and
`rehearsal.rehearsing`.
"""
