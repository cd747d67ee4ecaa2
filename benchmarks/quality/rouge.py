"""ROUGE-L between two sequences of tokens (Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", 3.1)."""

from __future__ import annotations

from collections.abc import Sequence


def longest_common_subsequence(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest subsequence that both have; O(len(a) len(b))."""
    above = [0] * (len(b) + 1)
    for token in a:
        row = [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if token == other else max(above[j + 1], row[j]))
        above = row
    return above[-1]


def rouge_l(candidate: Sequence[int], reference: Sequence[int], *, beta: float = 1.0) -> float:
    """Return the F-measure of the longest common subsequence, from 0 to 1 (Lin 2004, equations 2 to 4).

    Recall R is its share of the reference, precision P its share of the candidate, F = (1 + beta^2) R P /
    (R + beta^2 P). Tokens are compared as they are: no words, no stemming, so figures are not those of packages that
    compare words. Two empty sequences are equal (1.0); one empty sequence shares nothing with another (0.0).
    """
    if not candidate and not reference:
        return 1.0
    common = longest_common_subsequence(candidate, reference)
    if not common:
        return 0.0
    recall, precision = common / len(reference), common / len(candidate)
    return (1 + beta**2) * recall * precision / (recall + beta**2 * precision)
