"""Each count of a verdict is right where all went well, and each can fail."""

from harnesses.checks import Leftovers, judge
from harnesses.truth import true_requests
from tests.harnesses.books import Books, chunks


def verdict(books, *, ended=(), left=(), unreferenced=(), unproven=(), removed=()):
    return judge(
        true_requests(books.exchanges),
        books.events,
        ended=ended,
        left=Leftovers(set(left) - {*unreferenced, *unproven}, set(unreferenced), set(unproven)),
        removed=dict.fromkeys(removed, 10**9),
        ends_of=lambda chat: [4 * (n + 1) for n in range(len(chat.messages) + 1)],
    )


def keys_of(books):
    return {key for each in books.exchanges for key in each.computed.keys}


def two_contexts(second="two"):
    books = Books()
    for uid in dict.fromkeys(("one", second)):
        books.begins(uid)
    books.request("first.......", "main", uid="one")
    books.request("second......", "other", uid=second)
    books.request("first.......aaaaaaaamore....", "main", uid="one")
    return books


def test_contexts_are_right_if_each_holds_all_calls_of_one():
    told = verdict(two_contexts())
    assert (told.contexts_right, told.contexts_wrong, told.requests) == (2, 0, 3)


def test_contexts_that_are_taken_for_one_are_both_wrong():
    told = verdict(two_contexts("one"))
    assert (told.contexts_right, told.contexts_wrong) == (0, 2)


def test_a_context_that_is_torn_apart_is_wrong():
    books = two_contexts()
    books.begins("three")
    books.request("first.......aaaaaaaamore....aaaaaaaaand.", "main", uid="three")
    told = verdict(books)
    assert (told.contexts_right, told.contexts_wrong) == (1, 1)


def test_a_request_that_was_not_followed_makes_its_context_wrong():
    books = two_contexts()
    books.request("third.......", "third")
    told = verdict(books)
    assert (told.contexts_right, told.contexts_wrong, told.unfollowed) == (2, 1, 1)


def edited(uid="one", **what):
    books = Books()
    books.begins("one")
    books.begins("two")
    books.request("head....long past.......", "main", uid="one")
    if what.get("declared"):
        books.replaces("one")
    after = books.request("head....summary.", "main", uid=uid)
    if what.get("mismatched"):
        books.mismatches(uid, after)
    return verdict(books)


def edits(told):
    return told.edits_exact, told.edits_inferred, told.edits_missed


def test_edits_are_exact_if_declared_inferred_if_not_and_missed_in_another_context():
    assert edits(edited(declared=True)) == (1, 0, 0)
    assert edits(edited()) == (0, 1, 0)
    assert edits(edited(declared=True, mismatched=True)) == (0, 1, 0)
    assert edits(edited(uid="two")) == (0, 0, 1)


def test_a_declaration_of_another_time_makes_no_edit_exact():
    books = Books()
    books.begins("one")
    books.replaces("one")
    books.request("head....long past.......", "main", uid="one")
    books.request("head....summary.", "main", uid="one")
    books.replaces("one")
    assert edits(verdict(books)) == (0, 1, 0)


def test_what_only_goes_on_is_no_edit():
    assert edits(verdict(two_contexts())) == (0, 0, 0)


def test_one_offs_are_seen_if_the_proxy_says_so():
    books = Books()
    books.begins("one")
    books.begins("aside", one_off=True)
    books.request("first.......", "main", uid="one")
    books.request("summarise...", "aside; relation=one-off; parent=main", uid="aside")
    books.request("summarise too", "aside; relation=one-off; parent=main", uid="one", one_off=True)
    books.request("summarise again", "aside; relation=one-off; parent=main", uid="one")
    told = verdict(books)
    assert (told.one_offs_seen, told.one_offs) == (2, 3)
    assert (told.contexts_right, told.contexts_wrong) == (1, 0)


def test_ends_are_seen_if_every_context_of_it_is_closed():
    books = two_contexts()
    books.closes("one")
    told = verdict(books, ended=["main", "other"])
    assert (told.ends_seen, told.ends) == (1, 2)


def test_dead_chunks_are_zombies_if_nothing_refers_to_them_else_held():
    books = two_contexts()
    every = keys_of(books)
    one = set(books.exchanges[1].computed.keys)
    assert verdict(books, ended=["main", "other"]).zombies == 0
    told = verdict(books, ended=["main", "other"], left=every, unreferenced=one)
    assert (told.zombies, told.held, told.unproven) == (len(one), len(every - one), 0)
    told = verdict(books, ended=["main", "other"], left=every, unproven=one)
    assert (told.zombies, told.held, told.unproven) == (0, len(every - one), len(one))


def test_what_a_living_context_holds_is_no_zombie():
    books = two_contexts()
    told = verdict(books, ended=["main"], left=keys_of(books), unreferenced=keys_of(books))
    assert told.zombies == len(keys_of(books) - set(books.exchanges[1].computed.keys)) > 0


def test_live_kv_is_lost_if_the_next_request_of_the_context_misses_it():
    books = Books()
    books.begins("one")
    books.request("first.......", "main", uid="one")
    gone = chunks("first.......")[1]
    later = books.request("first.......aaaaaaaamore", "main", uid="one", missing=[gone])
    assert later.computed.missing
    assert verdict(books, ended=["main"]).lost == 1


def test_what_was_dead_when_it_was_freed_is_not_lost_though_it_came_alive_again():
    books = Books()
    books.begins("one")
    gone = chunks("first.......")[1:2]
    books.request("first.......", "main", uid="one", missing=gone)
    books.request("first.......aaaaaaaamore", "main", uid="one", missing=gone, missing_since=-1)
    assert verdict(books, ended=["main"]).lost == 0


def test_words_that_come_back_after_an_edit_were_dead_and_are_not_lost():
    def lost_if_then(*messages):
        books = Books()
        books.begins("one")
        books.request("headsameold.past", "main", uid="one", messages=["same", "old.past"])
        gone = chunks("headsameold.")
        books.request("headsameold.next....", "main", uid="one", messages=messages, missing=gone)
        return verdict(books, ended=["main"]).lost

    assert lost_if_then("same", "old.past", "next") == 3
    assert lost_if_then("same", "old.next") == 2
    assert lost_if_then("old.next") == 1


def test_what_another_context_had_and_gave_up_is_not_lost():
    books = Books()
    books.begins("one")
    books.begins("two")
    books.request("first.......", "main", uid="one")
    books.request("first.......", "other", uid="two", missing=chunks("first......."))
    assert verdict(books, ended=["main", "other"]).lost == 0


def test_live_kv_is_lost_if_a_context_that_lives_on_is_left_without():
    books = two_contexts()
    gone = set(books.exchanges[1].computed.prompt_keys)
    left = keys_of(books) - gone
    assert verdict(books, left=left, removed=gone).lost == len(gone)
    assert verdict(books, left=left).lost == 0
    assert verdict(books, left=left, removed=gone, ended=["other"]).lost == 0
