"""The only room that draws privacy noise.

`simulated`  fast, from a key, in floating point: for simulation, never for a release
"""
