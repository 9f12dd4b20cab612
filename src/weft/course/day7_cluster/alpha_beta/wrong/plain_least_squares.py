# rejected at: right
# Absolute errors: the largest message decides, alpha is lost.
import numpy as np


def fit(sizes, times):
    beta, alpha = np.polyfit(sizes, times, 1)
    return float(alpha), float(beta)


def ring_s(n, size, alpha, beta):
    return 2 * (n - 1) * (alpha + size / n * beta)


def crossover(n, alpha, beta):
    return n * alpha / beta


def bus_bandwidth(n, size, seconds):
    return 2 * (n - 1) / n * size / seconds
