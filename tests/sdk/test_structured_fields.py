"""Whatever is written is what the proxy's parser reads."""

import http_sf
from hypothesis import given
from hypothesis import strategies as st

from kvtether.structured_fields import Token, dictionary

PRINTABLE = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40)
VALUES = st.one_of(
    PRINTABLE, st.booleans(), st.integers(0, 10**15 - 1), st.integers(0, 10**9).map(lambda n: n / 1000)
)
KEYS = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=5))
def test_a_dictionary_is_read_as_it_was_meant(members):
    written = dictionary(members)
    assert written.isascii()
    assert written.isprintable()
    read = http_sf.parse(written.encode(), tltype="dictionary")
    assert list(read) == list(members)
    for name, value in members.items():
        assert type(value)(read[name][0]) == value


def test_a_flag_stands_alone():
    assert dictionary({"ctx": "a", "one_off": True, "close": False}) == 'ctx="a", one_off, close=?0'


def test_a_token_has_no_quotes():
    read = http_sf.parse(dictionary({"waiting": Token("tool"), "eta": 2.0}).encode(), tltype="dictionary")
    assert isinstance(read["waiting"][0], http_sf.Token)
    assert str(read["waiting"][0]) == "tool"
