"""Synthetic text similar to what agents send: prose, JSON records and code, generated from a seed.

The words are fragments of the language reference behind Python's `help()`, so that tokenizers see a realistic
vocabulary. Every text is new: tokenizers cache words and passages, and texts assembled from a fixed pool of
passages were counted 18 times as fast.
"""

import json
from functools import cache
from pydoc_data.topics import topics
from random import Random
from typing import Final

_STATES: Final = ("open", "pending", "closed", "in_review", "blocked")


@cache
def _words() -> list[str]:
    words = " ".join(topics.values()).split()
    return [word for word in words if any(map(str.isalpha, word))]


def _fragment(random: Random, length: int) -> str:
    words = _words()
    start = int(random.random() * (len(words) - length))
    return " ".join(words[start : start + length])


def _name(random: Random) -> str:
    return "_".join(filter(str.isidentifier, _fragment(random, 3).lower().split())) or "value"


def _sentence(random: Random) -> str:
    first, second = _fragment(random, 6), _fragment(random, 5)
    return f"{first.capitalize()} {random.randrange(1000)}, {second}."


def _record(random: Random) -> str:
    return json.dumps(
        {
            f"{_name(random)}_id": f"{random.randrange(10**6):06d}",
            "state": random.choice(_STATES),
            "amount": round(random.uniform(1, 5000), 2),
            "note": _sentence(random),
        }
    )


def _function(random: Random) -> str:
    name, argument = _name(random), _name(random)
    return (
        f"def {name}({argument}: list[int]) -> int:\n"
        f'    """{_sentence(random)}"""\n'
        f"    return sum(item for item in {argument} if item > {random.randrange(500)})\n"
    )


_MAKERS: Final = (_sentence, _sentence, _record, _function)


def text(random: Random, size: int) -> str:
    """A new text of at least `size` characters; it is longer by less than one passage."""
    parts = [f"Case {random.randrange(10**12)}:"]
    length = len(parts[0])
    while length < size:
        part = random.choice(_MAKERS)(random)
        parts.append(part)
        length += len(part) + 1
    return "\n".join(parts)
