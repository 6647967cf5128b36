"""Facts of an answer, as a client would send them back."""

from proxy.answer_facts import ChoiceFact, ToolCallFact


def test_a_choice_is_the_message_of_the_next_call() -> None:
    choice = ChoiceFact(index=0, content="a", reasoning="r", tool_calls=(ToolCallFact("i", "f", "{}"),))
    function = {"name": "f", "arguments": "{}"}
    assert choice.message() == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [{"id": "i", "type": "function", "function": function}],
    }
