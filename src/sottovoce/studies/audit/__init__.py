"""The curious server, played by us: attacks on uploads, and a measured ε beside the promised one.

`messages` bounds what any attacker can do, and measures μ and ε through the real `client.release`;
`attacks` are those of a curious server; `findings` is all of it as data with a verdict, and what a
person sees. From outside use `auditing`, the command.
"""
