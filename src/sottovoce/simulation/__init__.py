"""Engines that compute a cohort's rounds on this machine, and the functions that run them.

`compiled` plays a batch of runs with one launch a round, `accelerator` several rounds a launch,
`streamed` reads rows that do not fit in memory, and `secure` lets every client make its own upload.
From outside use `simulate.simulate`, `simulate.resume` and `simulate.simulate_many`.
"""
