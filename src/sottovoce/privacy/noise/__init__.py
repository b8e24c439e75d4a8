"""The only room that draws privacy noise.

`secure`      exact integer Gaussians from the system's entropy: what a device may release
`envelope`    the staircase under which `secure` proposes
`comparison`  below the bell or not, in whole numbers, where floating point cannot tell
`simulated`   fast, from a key, in floating point: for simulation, never for a release
"""
