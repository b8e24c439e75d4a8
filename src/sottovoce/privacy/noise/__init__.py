"""The only package that draws privacy noise.

`secure` draws exact integer Gaussians from the system's entropy, which is what a device may
release. `simulated` draws from a key in floating point: for simulation, never for a release.
"""
