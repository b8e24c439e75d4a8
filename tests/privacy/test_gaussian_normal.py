"""Φ, Φ⁻¹ and Mills' ratio against mpmath (40 digits) and scipy."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import scipy.special as sc

from sottovoce.privacy.gaussian import cdf, mills, quantile

X = np.concatenate([np.linspace(-40, 8, 2001), -np.geomspace(1e-12, 1e12, 400), [0.0]])


def test_mills_ratio_to_the_last_digits():
    with mp.workdps(40):
        for x in np.concatenate([np.linspace(-35, 5, 161), -np.geomspace(1e-9, 1e6, 60)]):
            z = mp.mpf(float(x))
            exact = mp.exp(z * z / 2) * mp.sqrt(mp.pi / 2) * mp.erfc(-z / mp.sqrt(2))
            assert abs(float(mp.mpf(float(mills(x))) / exact - 1)) < 4e-15, x


def test_mills_ratio_agrees_with_scipy_everywhere():
    expected = np.sqrt(np.pi / 2) * sc.erfcx(-X / np.sqrt(2))
    np.testing.assert_allclose(mills(X), expected, rtol=3e-14)


def test_cdf_agrees_with_scipy():
    x = np.linspace(-37, 9, 4001)
    np.testing.assert_allclose(cdf(x), sc.ndtr(x), rtol=1e-12)


def test_quantile_inverts_and_agrees_with_scipy():
    p = np.concatenate([np.geomspace(1e-300, 0.5, 500), 1 - np.geomspace(1e-12, 0.5, 200)])
    np.testing.assert_allclose(quantile(p), sc.ndtri(p), rtol=1e-12, atol=1e-15)


def test_quantile_at_the_ends():
    assert quantile([0.0, 1.0, 0.5]).tolist() == [-np.inf, np.inf, 0.0]
