"""The curious server, played by us: attacks on uploads, and a measured ε beside the promised one.

ceiling     what any attacker can do at most, and what a count of hits and alarms proves
messages    worst-case neighbours through the real `client.release`: μ and ε, measured
canaries    the same from one run with many canaries
naming      the candidate that is likeliest under the noise
inversion   a sample read off the gradient of the first dense layer; labels
matching    several samples found by matching gradients
traps       a dishonest server whose weights isolate single samples
membership  was this record in the training data? Loss threshold and likelihood ratio
similarity  how alike two pictures are
findings    everything measured, as plain data with a verdict
auditing    `sottovoce audit`
pictures, page   what a person looks at
"""
