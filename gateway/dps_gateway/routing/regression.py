"""Online least squares with non-negative coefficients, a prior and exponential forgetting. This module performs no I/O.

Only the sums Σ w x xᵀ and Σ w x y are kept. The sums of independent observations can be added, so that gateway replicas
can combine theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

SWEEPS: Final = 12
"""Passes of coordinate descent. They start at the previous solution, so that few are sufficient."""


@dataclass(slots=True)
class Moments:
    """The weighted sums over observations of several features x and one response y."""

    products: list[float]
    """Σ w x xᵀ, row by row."""
    responses: list[float]
    """Σ w x y."""

    @classmethod
    def zero(cls, size: int) -> Self:
        """No observations of `size` features."""
        return cls([0.0] * size**2, [0.0] * size)

    def decay(self, factor: float) -> None:
        """Multiply the weights of all observations by `factor`."""
        self.products = [factor * value for value in self.products]
        self.responses = [factor * value for value in self.responses]

    def add(self, features: Sequence[float], response: float, weight: float) -> None:
        """Add one observation."""
        size = len(features)
        for row, left in enumerate(features):
            if left:
                for column, right in enumerate(features):
                    self.products[row * size + column] += weight * left * right
                self.responses[row] += weight * left * response

    def plus(self, other: Self) -> "Moments":
        """The sums over the observations of both. Raises ValueError if they have different features."""
        return Moments(
            [a + b for a, b in zip(self.products, other.products, strict=True)],
            [a + b for a, b in zip(self.responses, other.responses, strict=True)],
        )

    def solve(
        self, prior: Sequence[float], strengths: Sequence[float], start: Sequence[float]
    ) -> list[float]:
        """The coefficients β >= 0 that minimise Σ w (y - βx)² + Σ strength (β - prior)².

        The search starts at `start`. `strengths` must be positive.
        """
        size, products = len(self.responses), self.products
        beta = list(start)
        for _ in range(SWEEPS):
            for row in range(size):
                first = row * size
                diagonal = products[first + row]
                explained = sum(products[first + column] * beta[column] for column in range(size))
                free = self.responses[row] - explained + diagonal * beta[row]
                beta[row] = max(0.0, (free + strengths[row] * prior[row]) / (diagonal + strengths[row]))
        return beta
