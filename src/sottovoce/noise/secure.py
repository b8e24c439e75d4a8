import numpy as np


def draw(count, sigma):
    return np.rint(np.random.default_rng().standard_normal(count) * sigma).astype(np.int64)
