import json

from harnesses.truth import Relation, contexts, read_truth, true_requests
from tests.harnesses.books import TAIL, Books


def told(books):
    return [(each.ctx, str(each.relation)) for each in true_requests(books.exchanges)]


def test_a_list_goes_on_or_is_edited():
    books = Books()
    books.request("one.........", "main")
    books.request(f"one.........{TAIL}two.", "main")
    books.request("one.....", "main")
    assert told(books) == [("main", "new"), ("main", "append"), ("main", "edit")]


def test_the_same_list_again_is_no_edit_and_neither_is_an_answer_left_out():
    books = Books()
    books.request("one.........", "main")
    books.request("one.........", "main")
    books.request("one.........other", "main")
    assert {relation for _, relation in told(books)[1:]} == {"append"}


def test_whose_a_request_is():
    books = Books()
    books.request("1", headers=[("thread-id", "t-1")], task_id="r")
    books.request("2", headers=[("x-claude-code-session-id", "s")], task_id="r")
    books.request(
        "3", headers=[("x-claude-code-session-id", "s"), ("x-claude-code-agent-id", "a")], task_id="r.1"
    )
    books.request("4", headers=[("x-session-id", "o")], task_id="r")
    books.request("5", "mine", headers=[("x-session-id", "o")], task_id="r")
    books.request("6", task_id="r")
    assert [ctx for ctx, _ in told(books)] == ["t-1", "s", "s:a", "o", "mine", "r"]


def test_a_subagent_is_known_by_its_task():
    books = Books()
    books.request("parent", task_id="r")
    books.request("child", task_id="r.2.0")
    assert told(books) == [("r", "new"), ("r.2.0", "subagent")]


def test_a_summary_that_comes_back_in_place_of_the_list_is_a_compaction():
    books = Books()
    summary = "What was done so far, in a few words that nobody else says."
    long = books.request("a long list of many words", task_id="r")
    books.request("please", task_id="r", kind="summary", answer=summary)
    books.request("short", task_id="r", body={"messages": [summary]})
    assert told(books) == [("r", "new"), ("r", "one-off"), ("r", "compaction")]
    assert [each.before for each in true_requests(books.exchanges)] == [None, long, long]
    assert [len(of) for of in contexts(true_requests(books.exchanges)).values()] == [2]


def test_a_driver_may_say_what_no_token_tells():
    books = Books()
    parent = books.request("one.........", "main")
    books.request(f"one.........{TAIL}way", "way-1; relation=fork; parent=main")
    (_, fork) = true_requests(books.exchanges)
    assert (fork.ctx, fork.relation, fork.before) == ("way-1", Relation.FORK, parent)


def test_a_truth_file_is_read_as_far_as_it_was_written(tmp_path):
    path = tmp_path / "truth.jsonl"
    assert read_truth(path) == []
    path.write_text(json.dumps({"did": "close", "ctx": "main"}) + '\n{"did": "do')
    (line,) = read_truth(path)
    assert (line.did, line.ctx) == ("close", "main")
