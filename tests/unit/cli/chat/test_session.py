"""The conversation without server, terminal or clock: what is typed, what is sent, what commands do."""

from __future__ import annotations

import json

import pytest

from kvolt.cli.chat.answer import ChatAnswer
from kvolt.cli.chat.session import (
    COMMANDS,
    Action,
    Ask,
    ChatMessage,
    ChatSession,
    Complain,
    Composer,
    Leave,
    Save,
    Say,
    UseModel,
    unknown_field,
)
from kvolt.cli.chat.stream import CallPiece, ChatUsage, Piece
from kvolt.core.request import Sampling


def answer(text: str = "", *calls: CallPiece) -> ChatAnswer:
    given = ChatAnswer(sent_at=0.0)
    given.add(Piece(content=text, calls=calls), 1.0)
    return given


def talk(session: ChatSession, *typed: str) -> Action:
    action: Action = Leave()
    for text in typed:
        action = session.handle(ChatMessage(text))
    return action


def ask(session: ChatSession, question: str, reply: str) -> None:
    assert talk(session, question) == Ask()
    session.answered(answer(reply))


def sent(session: ChatSession) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in session.body()["messages"]]


# --- what is typed


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], ChatMessage("hello")),
        (["  hello "], ChatMessage("hello")),
        (["one \\", "two\\", "three"], ChatMessage("one \ntwo\nthree")),
        (['"""one', " two", 'three"""'], ChatMessage("one\n two\nthree", verbatim=True)),
        (['"""', "/exit\\", '"""'], ChatMessage("/exit\\", verbatim=True)),
        (['"""all of it"""'], ChatMessage("all of it", verbatim=True)),
        (['  """pasted\nas one"""  '], ChatMessage("pasted\nas one", verbatim=True)),
        (["a \\", '"""b'], ChatMessage('a \n"""b')),
        (["caf\udce9"], ChatMessage("caf?")),
    ],
)
def test_messages_of_several_lines(lines: list[str], message: ChatMessage) -> None:
    composer = Composer()
    for line in lines[:-1]:
        assert composer.feed(line) is None
        assert composer.is_open
    assert composer.feed(lines[-1]) == message
    assert not composer.is_open


def test_nothing_is_no_message() -> None:
    composer = Composer()
    for line in ("", "   ", '""""""'):
        assert composer.feed(line) is None
        assert not composer.is_open
    composer.feed('"""given up')
    composer.reset()
    assert composer.feed("new") == ChatMessage("new")


# --- turns


def test_every_turn_is_sent() -> None:
    session = ChatSession("m", system="be short")
    ask(session, "one", "1")
    talk(session, "two")
    body = session.body()
    assert sent(session) == [("system", "be short"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    assert (body["model"], body["stream"]) == ("m", True)
    assert body["stream_options"] == {"include_usage": True}


def test_a_failed_turn_is_asked_again_or_replaced() -> None:
    session = ChatSession("m")
    talk(session, "one")  # and no answer comes
    assert talk(session, "/retry") == Ask()
    assert sent(session) == [("user", "one")]
    talk(session, "two")
    assert sent(session) == [("user", "two")]


def test_an_empty_answer_leaves_the_question_open() -> None:
    session = ChatSession("m")
    talk(session, "one")
    session.answered(ChatAnswer(sent_at=0.0))
    assert (session.question, session.turns) == ("one", [])


def test_retry_replaces_the_answer_and_undo_takes_back() -> None:
    session = ChatSession("m")
    ask(session, "one", "1")
    ask(session, "two", "2")
    assert talk(session, "/retry") == Ask()
    session.answered(answer("2nd"))
    assert sent(session)[-2:] == [("user", "two"), ("assistant", "2nd")]
    assert talk(session, "/undo") == Say("removed: two")
    talk(session, "open\nquestion")
    assert talk(session, "/undo") == Say("removed: open")
    assert sent(session) == [("user", "one"), ("assistant", "1")]
    talk(session, "/undo")
    assert isinstance(talk(session, "/undo"), Complain)
    assert isinstance(talk(session, "/retry"), Complain)


def test_calls_stay_in_the_conversation_with_a_result() -> None:
    session = ChatSession("m")
    talk(session, "weather?")
    parts = (CallPiece(0, "c1", "get", '{"a"'), CallPiece(1, "", "other"), CallPiece(0, "", "", ": 1}"))
    session.answered(answer("", *parts))
    assert "tool" not in [role for role, _ in sent(session)]
    talk(session, "go on")
    _, assistant, *results, _ = session.body()["messages"]
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "call_1"]
    assert assistant["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"a": 1}'}
    assert [(result["role"], result["tool_call_id"]) for result in results] == [
        ("tool", "c1"),
        ("tool", "call_1"),
    ]


# --- commands


def test_help_names_every_command() -> None:
    action = talk(ChatSession("m"), "/help")
    assert isinstance(action, Say)
    assert all(f"  {name}" in action.text for name in COMMANDS)
    assert talk(ChatSession("m"), "/?") == action


def test_leaving() -> None:
    assert talk(ChatSession("m"), "/exit") == talk(ChatSession("m"), "/quit") == Leave()


def test_unknown_commands() -> None:
    action = talk(ChatSession("m"), "/hepl me")
    assert isinstance(action, Complain)
    assert "unknown command /hepl; did you mean /help?" in action.text
    assert ChatSession("m").handle(ChatMessage("/etc/passwd", verbatim=True)) == Ask()


def test_clear_keeps_the_settings() -> None:
    session = ChatSession("m", system="s")
    talk(session, "/set seed 1")
    ask(session, "one", "1")
    talk(session, "/clear")
    assert (sent(session), session.options) == ([("system", "s")], {"seed": 1})


def test_model_and_system() -> None:
    session = ChatSession("m")
    assert talk(session, "/model") == UseModel(None)
    assert talk(session, "/model other") == UseModel("other")
    assert talk(session, "/system") == Say("no system message")
    assert talk(session, "/system be\nbrief") == Say("system: be\nbrief")
    assert sent(session) == [("system", "be\nbrief")]
    talk(session, "/system -")
    assert sent(session) == []


def test_settings() -> None:
    session = ChatSession("m")
    assert talk(session, "/set") == Say("no fields are set; the server's defaults apply")
    assert talk(session, "/set temperature 0.2") == Say("temperature = 0.2")
    talk(session, "/set max_tokens 5", '/set stop ["a", "b"]', "/set reasoning_effort low")
    body = session.body()
    assert (body["temperature"], body["max_tokens"], body["stop"]) == (0.2, 5, ["a", "b"])
    assert body["reasoning_effort"] == "low"
    assert talk(session, "/set temperature -") == Say("temperature: server default")
    assert "temperature" not in session.body()
    listed = talk(session, "/set")
    assert listed == Say('max_tokens = 5\nstop = ["a","b"]\nreasoning_effort = "low"')


def test_set_knows_every_sampling_field() -> None:
    """Except the number of choices, which is one, and log probabilities, which the chat does not show."""
    fields = {*Sampling.__struct_fields__} - {"num_choices", "logprobs", "prompt_logprobs"}
    assert {name for name in fields if unknown_field(name)} == set()


@pytest.mark.parametrize(
    ("typed", "kind", "text"),
    [
        ("/set temperature hot", Complain, "temperature must be a number, not hot"),
        ("/set temperature NaN", Complain, "temperature must be a number, not NaN"),
        ("/set max_tokens 1.5", Complain, "max_tokens must be a whole number, not 1.5"),
        ("/set seed true", Complain, "seed must be a whole number"),
        ("/set messages []", Complain, "messages cannot be set"),
        ("/set stream false", Complain, "stream cannot be set"),
        ("/set temprature 1", Say, "unknown field, sent anyway; did you mean temperature?"),
        ("/set top_p", Say, "top_p is not set"),
        ("/save", Complain, "missing file name"),
        ("/save x", Complain, "nothing to save"),
        ("/stats", Say, "no answers yet"),
    ],
)
def test_what_commands_say(typed: str, kind: type[Say | Complain], text: str) -> None:
    action = talk(ChatSession("m"), typed)
    assert isinstance(action, kind)
    assert text in action.text


def test_save() -> None:
    session = ChatSession("m", system="s")
    talk(session, "/set seed 1")
    ask(session, "one", "1")
    action = talk(session, "/save talk.json")
    assert isinstance(action, Save)
    assert json.loads(action.text) == {"model": "m", "messages": session.messages(), "seed": 1}
    action = talk(session, "/save my talk.md")
    assert isinstance(action, Save)
    assert action.path == "my talk.md"
    assert action.text == ("# Conversation with m\n\n## system\n\ns\n\n## user\n\none\n\n## assistant\n\n1\n")


# --- numbers


def test_summary_and_stats() -> None:
    session = ChatSession("m")
    talk(session, "one")
    reply = ChatAnswer(sent_at=10.0)
    reply.add(Piece(), 10.2)
    reply.add(Piece(reasoning="hm"), 10.5)
    reply.add(Piece(content="a"), 11.0)
    reply.add(Piece(content="b", finish="length"), 12.5)
    reply.add(Piece(usage=ChatUsage(7, 5)), 13.0)
    assert reply.summary() == (
        "5 tokens, 2.0 tokens/s, first token after 0.50 s, prompt 7 tokens, "
        "cut at the token limit (/set max_tokens N)"
    )
    session.answered(reply)
    ask(session, "two", "2")
    action = talk(session, "/stats")
    assert isinstance(action, Say)
    assert action.text.startswith(
        "2 answers, 5 tokens, prompts 7 tokens, first token after 0.75 s on average"
    )


def test_summary_without_usage() -> None:
    assert answer("a").summary() == "1 piece, first token after 1.00 s"
    assert ChatAnswer(sent_at=0.0).summary() == "0 pieces"
    alone = answer("a")
    alone.add(Piece(usage=ChatUsage(1, 1)), 2.0)
    assert alone.summary() == "1 token, first token after 1.00 s, prompt 1 token"
