"""Texts for messages of which only id and length are known.

The same message always gets the same text, different ids get texts that differ within their first words, and
the text has the recorded number of tokens under the tokenizer it was made for. It is made of short common
words only, so it says nothing, and nobody wrote it.
"""

import hashlib
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from engine_bridge.sim.traces.calls import Message

Count = Callable[[str], int]
"""Tokens of a text, without what a template adds."""

_WORD_LIST = """
able about above act add after again age ago air all also always and animal answer any appear area arm around
art ask away back bad ball bank base be bear beat bed been before began behind best better between big bird
black block blood blue board boat body book both bottom box boy bring broad brown build burn busy but buy call
came can car card care carry case cause center chair chance change charge check child choose circle city class
clean clear climb close coat cold color come common cook cool copy corn corner cost could count country course
cover cross crowd cry cut dance dark day dead deal dear death decide deep did die direct divide do does dog
done door double doubt down draw dream dress drink drive drop dry during each early earth east easy eat edge
effect egg eight either else end energy engine enough enter equal even ever every exact eye face fact fair
fall family famous far farm fast father favor fear feed feel feet few field fight figure fill final find fine
finger finish fire first fish fit five flat floor flow flower fly follow food foot for force forest form four
free fresh friend from front fruit full fun game garden gas gave general gentle get girl give glad glass go
gold gone good got govern grand grass gray great green grew ground group grow guess guide had hair half hand
happen happy hard has hat have he head hear heart heat heavy held help her here high hill him his history hit
hold hole home hope horse hot hour house how huge human hundred hunt idea if inch industry insect instant iron
is island it job join joy jump just keep kept key kill kind king knew know lady lake land language large last
late laugh law lay lead learn least leave led left leg length less let letter level lie life lift light like
line list listen little live locate long look lost lot loud love low machine made magnet main major make man
many map mark market mass master match material matter may mean measure meat meet melody men metal method
middle might mile milk million mind mine minute miss mix modern moment money month moon more morning most
mother motion mount mountain mouth move much music must my name nation natural nature near neck need neighbor
never new next night nine no noise noon north nose not note nothing notice noun now number object observe
"""
_WORDS = _WORD_LIST.split()
_NUM_TELLING_WORDS = 8
_NUM_CORRECTIONS = 4
_FEWEST = 64


def words_as_tokens(text: str) -> int:
    """A count for engines whose tokenizer is not at hand: each of our words is one token in most of them."""
    return len(text.split())


def counted_by(tokenizer_file: Path) -> Count:
    """Counts by a `tokenizer.json`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


class Texts:
    """Makes texts under one tokenizer. `salt` keeps those of two replays apart.

    Where at least 64 of the words are one token each, alone and behind a space, only those are used and the
    length is exact. Otherwise it is corrected by counting, and close.
    """

    def __init__(self, count: Count = words_as_tokens, salt: str = "") -> None:
        self._count = count
        self._salt = salt
        single = [word for word in _WORDS if count(word) == count(f" {word}") == 1]
        sample = " ".join(random.Random(0).choices(single, k=1024)) if single else ""
        self.is_exact = len(single) >= _FEWEST and count(sample) == 1024
        self._words = single if self.is_exact else _WORDS
        self._tokens_per_word = 1.0 if self.is_exact else max(count(" ".join(_WORDS)), 1) / len(_WORDS)
        self._length_of: dict[str, int] = {}
        self.of_id = lru_cache(maxsize=4096)(self._of_id)

    def text(self, message: Message) -> str:
        """The message's text. Its length is that with which the id was first asked for."""
        return self.of_id(message.id, self._length_of.setdefault(message.id, message.num_tokens))

    def _of_id(self, message_id: str, num_tokens: int) -> str:
        digest = hashlib.blake2b(f"{self._salt}\0{message_id}".encode(), digest_size=16).digest()
        source = random.Random(digest)
        if self.is_exact:
            return " ".join(source.choices(self._words, k=num_tokens))
        words = source.choices(self._words, k=max(round(num_tokens / self._tokens_per_word), 1))
        for _ in range(_NUM_CORRECTIONS):
            missing = round((num_tokens - self._count(" ".join(words))) / self._tokens_per_word)
            if missing > 0:
                words += source.choices(self._words, k=missing)
            elif missing < 0 and len(words) > _NUM_TELLING_WORDS:
                del words[max(len(words) + missing, _NUM_TELLING_WORDS) :]
            else:
                break
        return " ".join(words)
