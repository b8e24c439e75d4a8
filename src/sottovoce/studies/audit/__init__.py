"""The curious server, played by us: attacks on uploads, and a measured ε beside the promised one.

`ceiling` is what any attacker can do at most; `messages` measures μ and ε through the real
`client.release`; `inversion` and `membership` are the attacks, `target` what they are run on;
`findings` is all of it as data with a verdict, `auditing` the command, `page` what a person sees.
"""
