"""Exact tokens of a text that mostly was tokenised before.

Tokenizers cut a text at its added tokens first and treat the pieces between separately. So the tokens
before the *start* of an added token stay what they are, whatever follows, if that token is certain to be
matched in the new text too. Such starts are kept as checkpoints.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
import sys
import zlib
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer

from engine_bridge.errors import RejectedByEngine

_BLOCK = 1 << 16


class Checkpoints(msgspec.Struct):
    """Starts of hard added tokens, as (character, token) positions; both ascend."""

    chars: array[int]
    tokens: array[int]

    @classmethod
    def none(cls) -> Checkpoints:
        return cls(array("I"), array("I"))

    def copy(self) -> Checkpoints:
        return Checkpoints(self.chars[:], self.tokens[:])


class TextTokenizer:
    """A fast tokenizer, with what its added tokens allow to conclude.

    A *hard* added token is matched wherever its characters stand: the text is not normalised before it is
    looked for. Where some added token depends on the characters before it (it strips them, or wants to be a
    whole word), no cut is safe, and every text is encoded as a whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend = tokenizer
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        unnormalised = _keeps_text(tokenizer)
        self._hard = {
            number: token.content for number, token in added.items() if unnormalised or not token.normalized
        }
        self._usable = not any(token.lstrip or token.single_word for token in added.values())
        self._longest = max((len(token.content) for token in added.values()), default=0)
        self._is_hard = np.zeros(max(added, default=-1) + 2, bool)
        self._is_hard[list(self._hard)] = True
        self._by_first: dict[str, tuple[str, ...]] = {}
        for token in added.values():
            first = token.content[:1]
            self._by_first[first] = (*self._by_first.get(first, ()), token.content)

    def encode(self, text: str, special: bool = False) -> array[int]:
        """Token ids; with `special` the tokens that the tokenizer puts around a text are added. Lets other
        threads run meanwhile. Raises `RejectedByEngine` for lone surrogates.
        """
        try:
            encoding = self.backend.encode_batch_fast([text], add_special_tokens=special)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise RejectedByEngine("the prompt is not valid Unicode") from error
        return array("I", encoding.ids)

    def ends(self, text: str) -> np.ndarray:
        """Per token, the greatest character position that it or a token before it ends at."""
        encoding = self.backend.encode_batch([text], add_special_tokens=False)[0]
        ends = np.fromiter((end for _, end in encoding.offsets), np.int64, len(encoding.offsets))
        return np.maximum.accumulate(ends) if len(ends) else ends

    def checkpoints(self, text: str, ids: array[int], first_char: int, first_token: int) -> Checkpoints:
        """Checkpoints of a text that starts at the given positions of the whole. None of them where the
        text's occurrences and the tokens disagree.
        """
        if not self._usable or not len(ids):
            return Checkpoints.none()
        numbers = np.frombuffer(ids, np.uint32)
        at = np.flatnonzero(self._is_hard[np.minimum(numbers, len(self._is_hard) - 1)])
        if not len(at):
            return Checkpoints.none()
        present = numbers[at].tolist()
        chars: list[int] = []
        expected = iter(present)
        for match in self._pattern(frozenset(present)).finditer(text):
            if self._hard.get(next(expected, -1)) != match.group():
                return Checkpoints.none()
            chars.append(first_char + match.start())
        if len(chars) != len(present):
            return Checkpoints.none()
        return Checkpoints(array("I", chars), array("I", (at + first_token).tolist()))

    @functools.lru_cache(maxsize=256)  # noqa: B019 - lives as long as the model's profile
    def _pattern(self, numbers: frozenset[int]) -> re.Pattern[str]:
        contents = sorted((self._hard[number] for number in numbers), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents)))

    def cut(self, points: Checkpoints, ids: array[int], common: int, near: str, near_start: int) -> int:
        """Index of the last checkpoint that is certain to hold in a new text, -1 for none.

        Old and new text share their first `common` characters; `near` is the new text around there, from
        `near_start` on: it must reach `longest` characters to both sides.
        """
        index = bisect.bisect_right(points.chars, common) - 1
        while index >= 0:
            start = points.chars[index]
            size = len(self._hard[ids[points.tokens[index]]])
            if start + size <= common and not self._crossed(start, common, near, near_start):
                return index
            index -= 1
        return -1

    def _crossed(self, start: int, common: int, near: str, near_start: int) -> bool:
        """Whether an added token of the new text begins before `start` and ends behind the common text."""
        for at in range(max(common - self._longest + 1, near_start), start):
            for content in self._by_first.get(near[at - near_start : at - near_start + 1], ()):
                if at + len(content) > common and near.startswith(content, at - near_start):
                    return True
        return False

    @property
    def longest(self) -> int:
        """Characters of the longest added token."""
        return self._longest


def _keeps_text(tokenizer: Tokenizer) -> bool:
    if tokenizer.normalizer is None:
        return True
    described = json.loads(tokenizer.to_str()).get("normalizer")
    return described is None or (described.get("type") == "Sequence" and not described.get("normalizers"))


def common_prefix(left: str, right: str) -> int:
    """Number of leading characters two texts share."""
    size = min(len(left), len(right))
    low = 0
    while low < size and left[low : low + _BLOCK] == right[low : low + _BLOCK]:
        low += _BLOCK
    low, high = min(low, size), min(low + _BLOCK, size)
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Rope:
    """A long text that changes at its end, in pieces; the part that stays is never copied.

    All but the last pieces are held compressed: they are read only when a prompt changed far back.
    """

    def __init__(self) -> None:
        self._pieces: list[str | bytes] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def replace_tail(self, kept: int, tail: str) -> None:
        """Keep the first `kept` characters and put `tail` after them."""
        while self._ends and self._start(len(self._ends) - 1) >= kept:
            self._pieces.pop()
            self._ends.pop()
        if self._ends and self._ends[-1] > kept:
            last = len(self._ends) - 1
            self._pieces[-1] = self._read(last)[: kept - self._start(last)]
            self._ends[-1] = kept
        for at in range(0, len(tail), _BLOCK):
            self._pieces.append(tail[at : at + _BLOCK])
            self._ends.append(kept + min(at + _BLOCK, len(tail)))
        self._pack()

    def _pack(self) -> None:
        """Compress what lies more than a block before the end, in pieces of about a block."""
        first = len(self._pieces)
        while first and isinstance(self._pieces[first - 1], str):
            first -= 1
        index = first
        while index < len(self._pieces) and self._ends[index] + _BLOCK <= len(self):
            if self._ends[index] - self._start(first) >= _BLOCK // 2:
                joined = "".join(self._read(at) for at in range(first, index + 1))
                packed = zlib.compress(joined.encode("utf-8", "surrogatepass"), 1)
                self._pieces[first : index + 1] = [packed]
                self._ends[first : index + 1] = [self._ends[index]]
                index = first
                first += 1
            index += 1

    def _read(self, index: int) -> str:
        piece = self._pieces[index]
        return piece if isinstance(piece, str) else zlib.decompress(piece).decode("utf-8", "surrogatepass")

    def tail(self, start: int) -> str:
        """Text from `start` on."""
        return self.cut(start, len(self))

    def cut(self, start: int, end: int) -> str:
        """Text between two positions."""
        out: list[str] = []
        index = bisect.bisect_right(self._ends, start)
        while index < len(self._ends) and (at := self._start(index)) < end:
            out.append(self._read(index)[max(start - at, 0) : end - at])
            index += 1
        return "".join(out)

    def copy(self) -> Rope:
        twin = Rope()
        twin._pieces, twin._ends = self._pieces[:], self._ends[:]
        return twin

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    @property
    def size_bytes(self) -> int:
        """Memory of the pieces."""
        return sum(map(sys.getsizeof, self._pieces))


class TokenisedText:
    """A text with its token ids, brought up to date by `update`."""

    def __init__(self) -> None:
        self.text = Rope()
        self.ids: array[int] = array("I")
        self.points = Checkpoints.none()

    def copy(self) -> TokenisedText:
        twin = TokenisedText()
        twin.text, twin.ids, twin.points = self.text.copy(), self.ids[:], self.points.copy()
        return twin

    def update(self, tokenizer: TextTokenizer, kept: int, tail: str) -> tuple[int, int]:
        """The text becomes its first `kept` characters and `tail`.

        Returns the number of leading tokens, and of characters, that are the same as before.
        """
        replaced = self.text.tail(kept)
        shared = len(replaced) if tail.startswith(replaced) else common_prefix(replaced, tail)
        common = kept + shared
        self.text.replace_tail(common, tail[shared:])
        near_start = max(0, common - tokenizer.longest)
        near = self.text.cut(near_start, common + tokenizer.longest)
        index = tokenizer.cut(self.points, self.ids, common, near, near_start)
        start, token = (self.points.chars[index], self.points.tokens[index]) if index >= 0 else (0, 0)
        rest = self.text.tail(start)
        ids = tokenizer.encode(rest)
        points = tokenizer.checkpoints(rest, ids, start, token)
        same = token + same_ids(self.ids[token:], ids)
        del self.ids[token:]
        self.ids.extend(ids)
        index = max(index, 0)
        del self.points.chars[index:], self.points.tokens[index:]
        self.points.chars.extend(points.chars)
        self.points.tokens.extend(points.tokens)
        return same, common

    def safe_start(self, common: int) -> int:
        """Last checkpoint, in characters, before the end of a common text; 0 without one."""
        index = bisect.bisect_left(self.points.chars, common) - 1
        return self.points.chars[index] if index >= 0 else 0

    def token_positions(self, tokenizer: TextTokenizer, chars: Sequence[int]) -> list[int]:
        """Per character position (ascending), the number of leading tokens whose text ends at or before
        it.
        """
        found: list[int] = []
        start, end, token = 0, 0, 0
        ends: np.ndarray | None = None
        for char in chars:
            if char >= len(self.text):
                found.append(len(self.ids))
                continue
            if ends is None or char >= end:
                index = bisect.bisect_right(self.points.chars, char) - 1
                start, token = (self.points.chars[index], self.points.tokens[index]) if index >= 0 else (0, 0)
                if char == start:
                    found.append(token)
                    continue
                start, end, token, ends = self._segment(tokenizer, index, start, token)
            found.append(token + int(np.searchsorted(ends, char - start, side="right")))
        return found

    def _segment(
        self, tokenizer: TextTokenizer, index: int, start: int, token: int
    ) -> tuple[int, int, int, np.ndarray]:
        """Bounds, first token and token ends of the text from checkpoint `index` to the next."""
        if index + 1 < len(self.points.chars):
            end, next_token = self.points.chars[index + 1], self.points.tokens[index + 1]
        else:
            end, next_token = len(self.text), len(self.ids)
        ends = tokenizer.ends(self.text.cut(start, end))
        if len(ends) == next_token - token:
            return start, end, token, ends
        return 0, len(self.text), 0, tokenizer.ends(self.text.tail(0))


def same_ids(old: array[int], new: array[int]) -> int:
    """Number of leading tokens two prompts share."""
    size = min(len(old), len(new))
    differs = (
        np.frombuffer(old, np.uint32)[:size] != np.frombuffer(new, np.uint32)[:size] if size else np.empty(0)
    )
    return int(np.argmax(differs)) if differs.any() else size
