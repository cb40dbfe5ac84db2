"""Families of small programming problems: each asks for one function, with numbers or letters of its own filled in.

`$name` in a problem's text and solution is replaced by a parameter, `$kth` by the ordinal of `k`. The text completes
"Write a Python function `f(…)` that …"; the solution is that function's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of problem. `parameters` maps each name to the values it may have."""

    name: str
    inputs: dict[str, str]
    """The function's arguments in order, by name, each with its kind (see `problems`)."""
    text: str
    body: str
    parameters: dict[str, Sequence[Any]]


SMALL, DIGITS, LETTERS = range(2, 10), range(10), "abdegilmnoprstu"

NUMBERS = (
    Family(
        "sum_of_multiples", {"n": "natural"},
        "returns the sum of all positive whole numbers below n that are multiples of $a or of $b.",
        "return sum(x for x in range(1, n) if x % $a == 0 or x % $b == 0)",
        {"a": range(2, 8), "b": range(8, 16)},
    ),
    Family(
        "digit_powers", {"n": "natural"},
        "returns the sum of the decimal digits of n, each raised to the power $p, modulo $m.",
        "return sum(int(d) ** $p for d in str(n)) % $m",
        {"p": range(1, 6), "m": range(7, 30)},
    ),
    Family(
        "count_digit", {"n": "natural"},
        "returns how often the digit $d is written when the numbers from 0 to n, both included, are put in base $b.",
        "count = 0\nfor x in range(n + 1):\n    while True:\n        count += x % $b == $d\n        x //= $b\n"
        "        if x == 0:\n            break\nreturn count",
        {"d": range(3), "b": range(3, 11)},
    ),
    Family(
        "in_base", {"n": "natural"},
        "returns n written in base $b as a string, with zeros in front to make it at least $w characters long.",
        "text = ''\nwhile n:\n    text = str(n % $b) + text\n    n //= $b\nreturn text.rjust($w, '0')",
        {"b": range(2, 10), "w": range(1, 9)},
    ),
    Family(
        "fizz", {"n": "natural"},
        'returns the list of the numbers from 1 to n, with multiples of $a replaced by "$x", those of $b by "$y" and '
        'those of both by "$x$y".',
        "result = []\nfor i in range(1, n + 1):\n    word = '$x' * (i % $a == 0) + '$y' * (i % $b == 0)\n"
        "    result.append(word or i)\nreturn result",
        {"a": range(2, 5), "b": range(5, 9), "x": ("fizz", "tick", "ping"), "y": ("buzz", "tock", "pong")},
    ),
    Family(
        "power_modulo", {"n": "natural"}, "returns $a to the power n, modulo $m.", "return pow($a, n, $m)",
        {"a": SMALL, "m": range(11, 60)},
    ),
    Family(
        "recurrence", {"n": "natural"},
        "returns the element at index n of the sequence that starts with $p, $q (indices 0 and 1) and in which each "
        "later element is $a times the one before plus $b times the one before that, modulo 1000.",
        "x, y = $p, $q\nfor _ in range(n):\n    x, y = y, ($a * y + $b * x) % 1000\nreturn x",
        {"p": range(3), "q": range(1, 4), "a": range(1, 4), "b": range(1, 4)},
    ),
    Family(
        "polynomial", {"x": "integer"}, "returns $a * x * x + $b * x - $c.", "return $a * x * x + $b * x - $c",
        {"a": SMALL, "b": SMALL, "c": SMALL},
    ),
    Family(
        "count_coprime", {"n": "natural"},
        "returns how many numbers from 1 to n, both included, share no divisor above 1 with $m and leave a remainder "
        "other than $r when divided by $k.",
        "from math import gcd\nreturn sum(gcd(x, $m) == 1 and x % $k != $r for x in range(1, n + 1))",
        {"m": range(6, 31), "k": range(3, 6), "r": range(3)},
    ),
    Family(
        "round_to", {"n": "integer"},
        "returns the multiple of $m nearest to n + $b, and the larger one where two are equally near.",
        "return (2 * (n + $b) + $m) // (2 * $m) * $m",
        {"m": range(3, 20), "b": range(1, 5)},
    ),
    Family(
        "reversed_digits", {"n": "natural"},
        "multiplies n by $a, adds $b, and returns the number whose decimal digits are those of the result, reversed.",
        "return int(str(n * $a + $b)[::-1])",
        {"a": range(1, 10), "b": DIGITS},
    ),
    Family(
        "largest_divisor", {"n": "natural"},
        "returns the largest divisor of n + $b that is at most $m.",
        "return max(d for d in range(1, $m + 1) if (n + $b) % d == 0)",
        {"m": range(5, 40), "b": range(1, 4)},
    ),
    Family(
        "count_bits", {"n": "natural"},
        "returns how many ones the binary form of n has after each bit is flipped that is a one in the binary form of "
        "$m.",
        "return bin(n ^ $m).count('1')",
        {"m": range(3, 100)},
    ),
    Family(
        "steps_to_one", {"n": "positive"},
        "counts the steps until n is 1: an even n is halved, to an odd one $c is added. It returns -1 if 1 is not "
        "reached in $limit steps.",
        "for step in range($limit + 1):\n    if n == 1:\n        return step\n"
        "    n = n // 2 if n % 2 == 0 else n + $c\nreturn -1",
        {"c": (1, 3, 5, 7), "limit": range(5, 16)},
    ),
)  # fmt: skip

LISTS = (
    Family(
        "with_remainder", {"numbers": "integers"},
        "returns the list of those numbers, in their order, that leave the remainder $r when divided by $m.",
        "return [x for x in numbers if x % $m == $r]",
        {"m": range(3, 8), "r": range(3)},
    ),
    Family(
        "scaled", {"numbers": "integers"}, "returns the list of the numbers, each multiplied by $a and then less $b.",
        "return [x * $a - $b for x in numbers]",
        {"a": SMALL, "b": range(1, 20)},
    ),
    Family(
        "every_kth", {"numbers": "integers"},
        "returns the list of every $kth number, starting with the one at index $s.", "return numbers[$s::$k]",
        {"k": range(2, 7), "s": range(5)},
    ),
    Family(
        "rotated", {"numbers": "integers"},
        "returns the list rotated to the left by $k places, with $b added to each number.",
        "if not numbers:\n    return []\nk = $k % len(numbers)\nreturn [x + $b for x in numbers[k:] + numbers[:k]]",
        {"k": range(1, 8), "b": range(1, 6)},
    ),
    Family(
        "chunk_sums", {"numbers": "integers"},
        "cuts the list into pieces of $k numbers (the last one may be shorter) and returns the list of their sums, "
        "each multiplied by $a.",
        "return [$a * sum(numbers[i : i + $k]) for i in range(0, len(numbers), $k)]",
        {"k": range(2, 6), "a": range(1, 8)},
    ),
    Family(
        "window_maxima", {"numbers": "integers"},
        "returns the list of the largest numbers among every $k that follow each other, less $b; the empty list if "
        "there are fewer than $k.",
        "return [max(numbers[i : i + $k]) - $b for i in range(len(numbers) - $k + 1)]",
        {"k": range(2, 6), "b": range(1, 8)},
    ),
    Family(
        "count_jumps", {"numbers": "integers"},
        "returns how many numbers differ from the one before by more than $k and are at most $m.",
        "return sum(abs(y - x) > $k and y <= $m for x, y in zip(numbers, numbers[1:]))",
        {"k": range(2, 12), "m": range(0, 40, 10)},
    ),
    Family(
        "clipped", {"numbers": "integers"},
        "returns the list with every number below $low replaced by $low, and every one above $high by $high.",
        "return [min(max(x, $low), $high) for x in numbers]",
        {"low": range(-20, 1, 4), "high": range(3, 24, 4)},
    ),
    Family(
        "pairs_with_sum", {"numbers": "integers"},
        "returns how many pairs of numbers at different places add up to a multiple of $m; each pair counts once.",
        "n = len(numbers)\nreturn sum((numbers[i] + numbers[j]) % $m == 0 for i in range(n) for j in range(i + 1, n))",
        {"m": range(2, 30)},
    ),
    Family(
        "kth_largest", {"numbers": "integers"},
        "leaves out all numbers above $m and returns the $kth largest of the different ones that are left, or None if "
        "there are not so many.",
        "left = sorted({x for x in numbers if x <= $m})\nreturn left[-$k] if len(left) >= $k else None",
        {"k": range(1, 5), "m": range(10, 45, 5)},
    ),
    Family(
        "longest_run", {"numbers": "integers"},
        "returns the length of the longest run of numbers next to each other that, with $b added, are no multiples of "
        "$m.",
        "best = run = 0\nfor x in numbers:\n    run = run + 1 if (x + $b) % $m else 0\n    best = max(best, run)\n"
        "return best",
        {"m": range(2, 8), "b": range(1, 6)},
    ),
    Family(
        "running_sums", {"numbers": "integers"},
        "returns the list of running sums modulo $m, where the sum starts at $s before the first number.",
        "result, total = [], $s\nfor x in numbers:\n    total = (total + x) % $m\n    result.append(total)\n"
        "return result",
        {"m": range(5, 25), "s": range(4)},
    ),
    Family(
        "weighted_sum", {"numbers": "integers"},
        "returns $a times the sum of the numbers at even indices minus $b times the sum of those at odd indices.",
        "return $a * sum(numbers[::2]) - $b * sum(numbers[1::2])",
        {"a": SMALL, "b": SMALL},
    ),
    Family(
        "at_most", {"numbers": "few_integers"},
        "returns the list without the numbers below $m, in which each number is kept only the first $k times.",
        "result = []\nfor x in numbers:\n    if x >= $m and result.count(x) < $k:\n        result.append(x)\n"
        "return result",
        {"k": range(1, 5), "m": range(-3, 4)},
    ),
    Family(
        "sorted_by_remainder", {"numbers": "integers"},
        "returns the list sorted by the remainder modulo $m, and numbers of the same remainder from $order.",
        "return sorted(numbers, key=lambda x: (x % $m, x * $sign))",
        {"m": range(2, 20), "order": ("small to large", "large to small")},
    ),
    Family(
        "without_range", {"numbers": "integers"},
        "returns the list without the numbers from $a to $b, both included, in reversed order.",
        "return [x for x in reversed(numbers) if not $a <= x <= $b]",
        {"a": range(-15, 0, 3), "b": range(5, 20, 3)},
    ),
    Family(
        "remainder_counts", {"numbers": "integers"},
        "returns a dictionary from the remainders modulo $m that occur to how many numbers leave them; numbers above "
        "$k are left out.",
        "counts = {}\nfor x in numbers:\n    if x <= $k:\n        counts[x % $m] = counts.get(x % $m, 0) + 1\n"
        "return counts",
        {"m": range(2, 9), "k": range(10, 40, 10)},
    ),
    Family(
        "split_by", {"numbers": "integers"},
        "returns a list of two lists: the numbers that are smaller than $k, and the others, all with $b added.",
        "return [[x + $b for x in numbers if x < $k], [x + $b for x in numbers if x >= $k]]",
        {"k": range(-10, 20, 2), "b": range(1, 5)},
    ),
    Family(
        "alternating", {"first": "integers", "second": "integers"},
        "takes $a numbers from the first list, then $b from the second, and so on by turns until both are used up, and "
        "returns the list of them in the order they were taken; a list that has run out is passed over.",
        "result, i, j = [], 0, 0\nwhile i < len(first) or j < len(second):\n    result += first[i : i + $a]\n"
        "    result += second[j : j + $b]\n    i, j = i + $a, j + $b\nreturn result",
        {"a": range(1, 7), "b": range(1, 7)},
    ),
    Family(
        "common", {"first": "few_integers", "second": "few_integers"},
        "returns the sorted list of the different numbers in the first list for which the second list has that number "
        "plus $k, and which are no multiples of $m.",
        "return sorted({x for x in first if x + $k in second and x % $m})",
        {"k": range(1, 6), "m": range(2, 8)},
    ),
)  # fmt: skip

TEXTS = (
    Family(
        "shifted", {"text": "text"},
        "moves each lower-case letter of the text $k places on in the alphabet (z is followed by a), leaves all else "
        'as it is, adds "$end" and returns the result.',
        "letters = 'abcdefghijklmnopqrstuvwxyz'\n"
        "moved = [letters[(letters.index(c) + $k) % 26] if c in letters else c for c in text]\n"
        "return ''.join(moved) + '$end'",
        {"k": range(1, 26), "end": ("!", ".", "?")},
    ),
    Family(
        "without_every_kth", {"text": "text"},
        'removes every $kth character of the text and replaces each "$c" that is left by "$d".',
        "kept = ''.join(c for i, c in enumerate(text, 1) if i % $k)\nreturn kept.replace('$c', '$d')",
        {"k": range(2, 7), "c": "aeiou", "d": "-_*"},
    ),
    Family(
        "long_words", {"text": "text"},
        'returns the words of the text that have at least $k letters, in their order and joined by "$sep".',
        "return '$sep'.join(word for word in text.split() if len(word) >= $k)",
        {"k": range(3, 8), "sep": ("-", "_", "+", ", ", "/")},
    ),
    Family(
        "padded", {"text": "word"},
        'puts "$c" characters in front of the text to make it at least $w characters long, then adds "$d" at the end.',
        "return text.rjust($w, '$c') + '$d'",
        {"w": range(5, 14), "c": ".*-_", "d": "<>|"},
    ),
    Family(
        "vowels_out", {"text": "text"},
        'replaces each vowel (a, e, i, o, u) of the text by "$c" and returns the first $k characters of the result.',
        "return ''.join('$c' if c in 'aeiou' else c for c in text)[:$k]",
        {"c": "*.-_#", "k": range(4, 16)},
    ),
    Family(
        "words_with", {"text": "text"},
        'returns how many words of the text contain the letter "$c" and have fewer than $k letters.',
        "return sum('$c' in word and len(word) < $k for word in text.split())",
        {"c": LETTERS, "k": range(4, 8)},
    ),
    Family(
        "repeated", {"text": "word"},
        'repeats each character of the text $k times and puts "$sep" between the groups.',
        "return '$sep'.join(c * $k for c in text)",
        {"k": range(2, 8), "sep": ("-", "_", "+", ".", "/")},
    ),
    Family(
        "pieces", {"text": "text"},
        'cuts the text into pieces of $k characters (the last one may be shorter), reverses each, and joins them by '
        '"$sep".',
        "return '$sep'.join(text[i : i + $k][::-1] for i in range(0, len(text), $k))",
        {"k": range(2, 8), "sep": ("|", "-", "+", "/")},
    ),
    Family(
        "longest_without", {"words": "words"},
        'returns the longest of the words that does not contain the letter "$c" (the first of those that are equally '
        'long), or "$none" if there is none.',
        "left = [word for word in words if '$c' not in word]\nreturn max(left, key=len, default='$none')",
        {"c": LETTERS, "none": ("", "none", "-")},
    ),
    Family(
        "capitals", {"text": "text"},
        "makes every $kth character of the text upper-case, starting with the one at index $s.",
        "return ''.join(c.upper() if i >= $s and (i - $s) % $k == 0 else c for i, c in enumerate(text))",
        {"k": range(2, 7), "s": range(6)},
    ),
    Family(
        "different_pieces", {"text": "few_letters"},
        'returns how many different texts of $k characters occur in the text and do not start with "$c".',
        "found = {text[i : i + $k] for i in range(len(text) - $k + 1)}\nreturn sum(x[0] != '$c' for x in found)",
        {"k": range(1, 5), "c": "abcd"},
    ),
    Family(
        "by_length", {"words": "words"},
        "returns a dictionary from the lengths of the words to the sorted lists of the words of that length, without "
        "words of more than $k letters or that end in $c.",
        "groups = {}\nfor word in sorted(words):\n    if len(word) <= $k and not word.endswith('$c'):\n"
        "        groups.setdefault(len(word), []).append(word)\nreturn groups",
        {"k": range(4, 9), "c": "enrstl"},
    ),
    Family(
        "run_lengths", {"text": "few_letters"},
        "replaces each run of $k or more equal letters by the letter, the sign $sign and the length of the run; "
        "shorter runs stay as they are.",
        "from itertools import groupby\nresult = ''\nfor c, run in groupby(text):\n    n = len(list(run))\n"
        "    result += f'{c}$sign{n}' if n >= $k else c * n\nreturn result",
        {"k": range(2, 5), "sign": "*:^#=~"},
    ),
)  # fmt: skip

TABLES = (
    Family(
        "at_least", {"prices": "prices"},
        "returns the sorted list of the names whose price is at least $k and not a multiple of $m.",
        "return sorted(name for name, price in prices.items() if price >= $k and price % $m)",
        {"k": range(3, 20), "m": range(2, 7)},
    ),
    Family(
        "raised", {"prices": "prices"},
        "returns a dictionary of the same names with the prices below $k raised by $a and the others lowered by $b.",
        "return {name: price + $a if price < $k else price - $b for name, price in prices.items()}",
        {"k": range(5, 20, 3), "a": range(1, 6), "b": range(1, 4)},
    ),
    Family(
        "bill", {"prices": "prices", "names": "words"},
        "returns the sum of the prices of the names in the list; a name without a price costs $d, and a sum above $k "
        "is lowered by $r.",
        "total = sum(prices.get(name, $d) for name in names)\nreturn total - $r if total > $k else total",
        {"d": range(1, 8), "k": range(15, 45, 5), "r": range(1, 5)},
    ),
)  # fmt: skip

FAMILIES = NUMBERS + LISTS + TEXTS + TABLES
