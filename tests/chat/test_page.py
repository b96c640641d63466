"""The page of `eagle31 app`: what its handlers yield, and what a visitor sees in a real browser."""

import asyncio
import html
import http.client
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from chat.conversations import conversation
from programs import be, forkserver
from serving.servers import free_port

from eagle31_hf import demo

gr = pytest.importorskip("gradio")
from eagle31_hf.chat.page import AUTO, BEGUN, CHAIN, MOST_WORDS, TREE, Page, PlainEvents, messages_of, tokens_html  # noqa: E402 -- behind the check that gradio is there  # fmt: skip

WORDS = "class Parser(object):"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def page():
    made = Page(conversation, "a pair")
    yield made
    made.worker.shutdown(wait=True)


def test_an_answer_grows_round_by_round(page):
    visitor = {}
    chat = page.conversation_of(visitor)
    yields = list(page.ask(visitor, WORDS, CHAIN, 3, 24))
    [answer] = chat.answers
    assert len(yields) > 3
    texts = [messages[-1]["content"] for _, messages, _, _ in yields]
    assert texts == sorted(texts, key=len)
    left, messages, tokens, line = yields[-1]
    assert (left, messages) == ("", messages_of(chat))
    assert tokens == tokens_html(answer.pieces)
    assert line == answer.figures.line
    assert (
        answer.ids == conversation(knobs={"num_assistant_tokens": 3}).ask(WORDS, lambda *_: None, threading.Event()).ids
    )
    assert tokens.count('class="accepted"') == answer.figures.accepted > 0


def test_the_target_alone_beside_it(page):
    visitor = {}
    chat = page.conversation_of(visitor)
    list(page.ask(visitor, WORDS, AUTO, 3, 24))
    yields = list(page.compare(visitor))
    assert "times as fast; the same text" in yields[-2][2]
    assert yields[-1][1] == tokens_html(chat.answers[0].pieces), "the page ends with the drafted answer's tokens"
    assert len(chat.answers) == 1


def test_errors_are_told_and_nothing_is_kept(page):
    visitor = {}
    chat = page.conversation_of(visitor)
    with pytest.raises(gr.Error, match="nothing has been asked"):
        list(page.compare(visitor))
    with pytest.raises(gr.Error, match="expected fewer than 2048"):
        list(page.ask(visitor, "x = 1\n" * 3000, AUTO, 3, 24))
    assert chat.messages == []
    assert list(page.ask(visitor, "  ", AUTO, 3, 24))[-1][3] == "Say something first."


def hold_answers(chat):
    """Has the next answers go on from their first round only when they are stopped."""
    own = chat.ask

    def ask(words, show, stop):
        def show_and_wait(*shown):
            show(*shown)
            assert stop.wait(60)

        return own(words, show_and_wait, stop)

    chat.ask = ask


def test_a_visitor_who_goes_away_stops_the_answer(page):
    """Then the next visitor's answer is whole: nothing of the stop is left."""
    visitor, another = {}, {}
    chat, other = page.conversation_of(visitor), page.conversation_of(another)
    hold_answers(chat)
    rounds = page.ask(visitor, WORDS, CHAIN, 2, 24)
    next(rounds)
    rounds.close()
    del chat.ask
    list(page.ask(another, WORDS, CHAIN, 2, 24))
    assert chat.answers[0].was_stopped
    assert len(chat.answers[0].ids) < len(other.answers[0].ids)
    list(page.ask(visitor, WORDS, CHAIN, 2, 24))
    assert not chat.answers[1].was_stopped


def test_a_new_conversation_while_an_answer_is_made(page):
    """The answer ends in the conversation that it belongs to; the new one is empty, and its answers are whole."""
    visitor = {}
    before = page.conversation_of(visitor)
    rounds = page.ask(visitor, WORDS, CHAIN, 2, 24)
    next(rounds)
    assert page.clear(visitor)[0] == []
    assert list(rounds) == [], "the answer before is shown in the new conversation"
    assert page.conversation_of(visitor) is not before
    assert messages_of(page.conversation_of(visitor)) == []
    list(page.ask(visitor, WORDS, CHAIN, 2, 24))
    assert [message["role"] for message in page.conversation_of(visitor).messages] == ["user", "assistant"]
    assert not page.conversation_of(visitor).answers[0].was_stopped


def test_what_a_visitor_does_while_others_wait(page):
    """A question that waits for another visitor's answer is stopped, too, and is none of a new conversation."""
    shown, visitor, busy = {}, {}, threading.Event()
    page.worker.submit(busy.wait)
    rounds = page.ask(visitor, WORDS, CHAIN, 2, 24)
    before = page.conversation_of(visitor)
    asking = threading.Thread(target=lambda: shown.update(rounds=list(rounds)))
    asking.start()
    while not visitor.get("stops"):
        time.sleep(0.001)
    page.clear(visitor)
    busy.set()
    asking.join()
    page.worker.submit(int).result()  # behind the answer, which nobody waits for
    assert shown["rounds"] == []
    assert before.answers[0].was_stopped
    assert len(before.answers[0].ids) == 1
    assert page.conversation_of(visitor).messages == []


def test_two_questions_at_once_are_answered_one_after_the_other(page):
    """The second one is shown behind the first and its answer; Stop stops both."""
    visitor, shown = {}, {}

    def ask(words):
        shown[words] = [messages for _, messages, _, _ in page.ask(visitor, words, CHAIN, 2, 24)]

    def both(before):
        asking = [threading.Thread(target=ask, args=(words,)) for words in (WORDS, "def main(argv):")]
        busy = threading.Event()
        page.worker.submit(busy.wait)
        for number, thread in enumerate(asking, 1):
            thread.start()
            while len(visitor.get("stops", [])) < number:
                time.sleep(0.001)
        before()
        busy.set()
        for thread in asking:
            thread.join()

    both(lambda: None)
    said = messages_of(page.conversation_of(visitor))
    assert [message["content"] for message in said[::2]] == [WORDS, "def main(argv):"]
    assert shown["def main(argv):"][0][:2] == shown[WORDS][-1] == said[:2]
    assert shown["def main(argv):"][-1] == said
    both(lambda: page.halt(visitor))
    assert [answer.was_stopped for answer in page.conversation_of(visitor).answers] == [False, False, True, True]


def test_a_comparison_does_not_come_back_in_a_new_conversation(page):
    visitor = {}
    list(page.ask(visitor, WORDS, CHAIN, 2, 24))
    rounds = page.compare(visitor)
    next(rounds)
    page.clear(visitor)
    assert list(rounds) == []


def test_stop_counts_only_while_an_answer_is_made(page):
    visitor = {}
    chat = page.conversation_of(visitor)
    page.halt(visitor)
    rounds = page.ask(visitor, WORDS, CHAIN, 2, 24)
    next(rounds)
    page.halt(visitor)
    last = list(rounds)[-1]
    assert last[3].endswith(", stopped") == chat.answers[0].was_stopped
    list(page.ask(visitor, WORDS, CHAIN, 2, 24))
    assert not chat.answers[1].was_stopped


@pytest.mark.parametrize(
    ("way", "knobs"),
    [
        (BEGUN, {"num_assistant_tokens": 5, "draft_tree_top_k": 6}),
        (AUTO, dict.fromkeys(("num_assistant_tokens", "draft_tree_top_k", "draft_tree_total_tokens"), "auto")),
        (CHAIN, {"num_assistant_tokens": 3, "draft_tree_top_k": 1}),
        (TREE, {"num_assistant_tokens": 3, "draft_tree_top_k": 6, "draft_tree_total_tokens": 12}),
    ],
)
def test_ways_of_drafting(way, knobs):
    begun = {"num_assistant_tokens": 5, "draft_tree_top_k": 6}
    page = Page(lambda: conversation(knobs=begun), "a pair")
    list(page.ask(visitor := {}, WORDS, way, 3, 12))
    assert page.conversation_of(visitor).answers[0].drafting == knobs
    page.close()


def test_a_saved_conversation(page):
    visitor = {}
    list(page.ask(visitor, WORDS, AUTO, 3, 24))
    file = page.saved_file(visitor)
    record = json.loads(Path(file.value["path"]).read_text())
    assert record["messages"][0]["content"] == WORDS


HOSTILE = (
    '<img src="http://127.0.0.1:9/x.png"> ![p](http://127.0.0.1:9/y.png) <form action="http://127.0.0.1:9"><input '
    'name=q><button>go</button></form><script>document.title = "owned"</script><style>*{display:none}</style> $$x^2$$ '
    "[a](javascript:alert(1)) <a href=http://127.0.0.1:9/>b</a> <b>c</b> **d** http://127.0.0.1:9/z"
    "\x1b[31m\n\n# e\n\n- f"
)


def saying(text):
    """A conversation whose target is made to say a text, token by token."""
    made = conversation()
    ids = made.tokenizer(text)["input_ids"]
    begin = []

    def allowed(_, sent):
        begin.append(len(sent))
        place = len(sent) - begin[0]
        return [ids[min(place, len(ids) - 1)]]

    made.options = {"max_new_tokens": len(ids), "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    return made


def test_what_a_target_says_is_shown_as_text(page):
    page.make = lambda: saying(HOSTILE)
    *_, (_, messages, tokens, _) = page.ask({}, "x", CHAIN, 3, 24)
    shown = messages[-1]["content"]
    assert "<" not in shown
    assert html.unescape(shown) == HOSTILE.replace("\x1b", r"\x1b")
    assert "\n" not in tokens
    assert set(re.findall(r"</?(\w+)", tokens)) == {"p", "span"}
    text = html.unescape(re.sub("<[^>]*>", "", tokens))
    assert text == HOSTILE.replace("\x1b", r"\x1b")


def test_a_page_that_is_closed_stops_its_answers(page):
    """Of those that are made, and those that wait."""
    visitor = {}
    hold_answers(page.conversation_of(visitor))
    rounds, waiting = page.ask(visitor, WORDS, CHAIN, 2, 24), page.ask({}, WORDS, CHAIN, 2, 24)
    next(rounds)
    ended = []

    def wait():
        with pytest.raises(gr.Error, match="the page is closed"):
            list(waiting)
        ended.append(True)

    page.make().options["max_new_tokens"] = 24
    thread = threading.Thread(target=wait)
    thread.start()
    while not page.worker._work_queue.qsize() and thread.is_alive():
        time.sleep(0.01)
    page.close()
    assert list(rounds)[-1][3].endswith(", stopped")
    thread.join()
    assert ended


def test_what_is_wrong_is_told_as_text(page):
    page.make = lambda: conversation(template="{{ raise_exception(messages[0]['content']) }}")
    with pytest.raises(gr.Error, match="refuses the conversation") as error:
        list(page.ask({}, "<img src=x>", CHAIN, 3, 24))
    assert "&lt;img src=x&gt;" in error.value.message


@pytest.mark.parametrize(
    ("way", "depth", "nodes"),
    [(TREE, 17, 24), (TREE, 0, 24), (TREE, "x", 24), (TREE, 3, 65), (TREE, 3, None), ("another", 3, 24)],
)
def test_sliders_that_no_page_has(address, way, depth, nodes):
    """Requests need no page: Gradio compares what they say with its sliders, before anything is answered."""
    sent = event("x", data=[None, WORDS, way, depth, nodes], session_hash=f"{way}-{depth}-{nodes}")
    kind = {"Content-Type": "application/json"}
    assert asked(address, "POST", "/gradio_api/queue/join", json.dumps(sent), **kind)[0] == 200
    told = asked(address, "GET", f"/gradio_api/queue/data?session_hash={sent['session_hash']}")[2].decode()
    events = [json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: ")]
    assert [one["success"] for one in events if one["msg"] == "process_completed"] == [False]


class Visitor:
    """A browser with the page open, and what it complains of."""

    def __init__(self, browser, address, scheme="light"):
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": 1300, "height": 900})
        self.page = self.context.new_page()
        self.complaints, self.hosts = [], set()
        self.page.on("console", lambda told: self.complaints.append(told.text) if told.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: self.hosts.add(asked.url.split("/")[2].split(":")[0]))
        self.page.goto(address)

    def say(self, words):
        box = self.page.get_by_label("Your words")
        box.fill(words)
        box.press("Enter")

    def figures(self, pattern):
        """Waits until the figures have this pattern, and returns them."""
        found = self.page.locator("#figures")
        sync_api.expect(found).to_contain_text(re.compile(pattern), timeout=60_000)
        return found.inner_text()

    def press(self, name):
        self.page.get_by_role("button", name=name, exact=True).click()


try:
    import axe_playwright_python.sync_playwright as axe
    from playwright import sync_api
except ImportError:
    sync_api = axe = None
in_browser = pytest.mark.skipif(sync_api is None or CHROMIUM is None, reason="needs Chromium, playwright and axe")


@pytest.fixture(scope="module")
def address():
    served = Page(conversation, "a pair")
    yield served.serve("localhost", free_port())
    served.close()
    served.worker.shutdown(wait=True)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


def saved_by(address):
    """The path of the conversation that a visitor has saved."""
    config = json.loads(asked(address, "GET", "/config")[2])
    [button] = [part["id"] for part in config["components"] if part["props"].get("value") == "Save the conversation"]
    [function] = [d["id"] for d in config["dependencies"] if [button, "click"] in d["targets"]]
    join = {"fn_index": function, "data": [None], "session_hash": "x"}
    kind = {"Content-Type": "application/json"}
    assert asked(address, "POST", "/gradio_api/queue/join", json.dumps(join), **kind)[0] == 200
    events = asked(address, "GET", "/gradio_api/queue/data?session_hash=x")[2].decode()
    return re.search(r'"path": ?"([^"]+conversation.json)"', events)[1]


def serve(arguments, folder, log):
    """The command, in a new process whose temporary files are in a folder."""
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    be(arguments, (log, log), "utf-8", ())


def test_the_command_ends_by_its_signal_and_leaves_nothing(tmp_path):
    folders = {name: str(demo.FOLDER / name) for name in ("target", "eagle31")}
    port, log, temporary = free_port(), tmp_path / "log", tmp_path / "tmp"
    command = ["app", "--port", str(port), "--target", folders["target"], "--drafter", folders["eagle31"]]
    temporary.mkdir()
    process = forkserver().Process(target=serve, args=(command, str(temporary), str(log)), daemon=True)
    process.start()
    try:
        said = f"serving target with eagle31 at http://localhost:{port}"
        while process.is_alive() and not (log.exists() and said in log.read_text()):
            time.sleep(0.02)
        assert saved_by(f"http://localhost:{port}").startswith(str(temporary / "eagle31-"))
    finally:
        process.terminate()
        process.join()
    assert process.exitcode == -signal.SIGTERM
    assert "stopped by SIGTERM" in log.read_text()
    assert list(temporary.glob("eagle31-*")) == []
    assert list(temporary.rglob("*.json")) == []


def asked(address, method, path, body=None, **headers):
    """The status, headers and body of an answer to any program."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    with closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_the_page_is_for_its_own_visitors(address):
    """No name that was made to lead here is answered, and no page of another origin."""
    status, headers, _ = asked(address, "GET", "/")
    assert status == 200
    assert "img-src 'self' data:" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    join = {"fn_index": 0, "data": [None, "x", CHAIN, 3, 24], "session_hash": "a"}
    for path, body in (("/gradio_api/queue/join", json.dumps(join)), ("/", None), ("/config", None)):
        method = "POST" if body else "GET"
        assert asked(address, method, path, body, Host="evil.example")[0] == 403
        assert asked(address, method, path, body, Origin="http://evil.example")[0] == 403
        assert asked(address, method, path, body, Origin="null")[0] == 403


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/upload_progress?upload_id=x"),
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/gradio_api/file=http://127.0.0.1:9/conversation.json"),
        ("GET", "/gradio_api/file=//127.0.0.1/conversation.json"),
        ("GET", "/gradio_api/file=/etc/../etc/conversation.json"),
        ("GET", "/gradio_api/proxy=http://127.0.0.1:9/x"),
        ("GET", "/gradio_api/info"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/login"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/monitoring"),
    ],
)
def test_what_the_page_does_not_ask_for_is_not_there(address, method, path):
    assert asked(address, method, path, b"{}" if method == "POST" else None)[0] in (403, 404)


def event(words, fn_index=0, **more):
    """What a browser sends where words are asked."""
    return {"fn_index": fn_index, "session_hash": "s", "data": [None, words, CHAIN, 3, 24], **more}


FILE = {"meta": {"_type": "gradio.FileData"}}


def test_no_more_of_a_long_event_is_read_than_one_may_have():
    given, sent = [], []

    async def receive():
        given.append(len(given))
        return {"type": "http.request", "body": b"x" * 2**16, "more_body": len(given) < 200}

    async def send(message):
        sent.append(message)

    asyncio.run(PlainEvents(None, {})({"type": "http", "method": "POST", "headers": []}, receive, send))
    assert sent[0]["status"] == 400
    assert len(given) == MOST_WORDS // 2**16 + 1


@pytest.mark.parametrize("route", ["/gradio_api/queue/join", "/gradio_api/run/predict"])
def test_no_event_has_a_file_read(address, tmp_path, route):
    """An object that looks like one is read by Gradio, or fetched, wherever it stands; an endless one for ever."""
    (tmp_path / "conversation.json").write_text("{}")
    kind = {"Content-Type": "application/json"}
    for path in (str(tmp_path / "conversation.json"), "/etc/passwd", "/dev/zero", "http://127.0.0.1:9/x"):
        for sent in (
            event({"path": path, **FILE}),
            event([{"path": path, **FILE}]),
            event(" ", event_data={"path": path}),
        ):
            status, _, body = asked(address, "POST", route, json.dumps(sent), **kind)
            if "event_data" not in sent:
                assert (status, json.loads(body)["error"]["code"]) == (400, "no_event")
        assert asked(address, "GET", f"/gradio_api/file={path}")[0] in (403, 404)
    assert asked(address, "GET", "/")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        [],
        "x",
        event("x", fn_index=99),
        event("x", fn_index=-1),
        event("x", fn_index=True),
        event("x", data=[None]),
        event("x", data=[None] * 9),
        event("x", data="x"),
        event("x", session_hash={"path": "/etc/passwd"}),
    ],
)
def test_events_that_no_page_sends(address, sent):
    kind = {"Content-Type": "application/json"}
    assert asked(address, "POST", "/gradio_api/queue/join", json.dumps(sent), **kind)[0] == 400
    assert asked(address, "POST", "/gradio_api/queue/join", b"{" * 100, **kind)[0] == 400
    assert asked(address, "POST", "/gradio_api/queue/join", b" " * (2**20 + 1), **kind)[0] == 400


def test_words_that_are_too_long_are_refused_unread(page):
    with pytest.raises(gr.Error, match="the conversation has 1000000 characters; expected at most 98304"):
        list(page.ask({}, "x" * 10**6, CHAIN, 3, 24))


@in_browser
def test_nothing_that_is_said_becomes_part_of_the_page(browser):
    """The answer and the question hold pictures, forms, scripts and links; a browser shows them as text."""
    served = Page(lambda: saying(HOSTILE), "<b>a</b> *pair*")
    visitor = Visitor(browser, served.serve("localhost", free_port()))
    visitor.say(HOSTILE.replace("\x1b", "").replace("\n", " "))
    visitor.figures(f"{saying(HOSTILE).options['max_new_tokens']} tokens")
    visitor.page.wait_for_timeout(500)
    assert visitor.hosts == {"localhost"}
    assert visitor.complaints == []
    assert visitor.page.title() == "<b>a</b> *pair*"
    shown = visitor.page.locator(".bot .message-content, [data-testid=bot]").first.inner_text()
    assert "<script>" in shown
    assert "**d**" in shown
    for kind in ("img[src*='127.0.0.1']", "form", "a[href*='127.0.0.1']", ".katex", "h1 b", "[data-testid=bot] b"):
        assert visitor.page.locator(kind).count() == 0
    visitor.context.close()
    served.close()
    served.worker.shutdown(wait=True)


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_visitor_asks_and_compares(browser, address, scheme):
    visitor = Visitor(browser, address, scheme)
    visitor.say(WORDS)
    accepted = int(re.search(r"(\d+) of \d+ drafted", visitor.figures("24 tokens.* accepted"))[1])
    assert visitor.page.locator(".tokens .accepted").count() == accepted > 0
    visitor.press("Compare with the target alone")
    assert "the same text" in visitor.figures("times as fast")
    visitor.press("Save the conversation")
    with visitor.page.expect_download() as download:
        visitor.page.get_by_role("link", name=re.compile("KB|B")).first.click()
    assert json.loads(Path(download.value.path()).read_text())["messages"][0]["content"] == WORDS
    found = axe.Axe().run(visitor.page)
    assert found.violations_count == 0, found.generate_report()
    assert visitor.complaints == []
    assert visitor.hosts == {"localhost"}, "the page asks for something from the network"
    visitor.press("New conversation")
    visitor.figures("Nothing was asked yet")
    visitor.context.close()


@in_browser
def test_two_visitors_have_conversations_of_their_own(browser, address):
    one, other = Visitor(browser, address), Visitor(browser, address)
    one.say(WORDS)
    other.say("import os")
    one.figures("24 tokens"), other.figures("24 tokens")
    assert one.page.get_by_text("import os").count() == 0
    assert other.page.get_by_text(WORDS).count() == 0
    one.page.close()
    other.say("import sys")
    sync_api.expect(other.page.get_by_text("import sys").first).to_be_visible()
    other.context.close()
    one.context.close()


@in_browser
def test_a_question_that_is_refused_is_told(browser, address):
    visitor = Visitor(browser, address)
    visitor.press("Compare with the target alone")
    sync_api.expect(visitor.page.get_by_text("nothing has been asked yet")).to_be_visible(timeout=30_000)
    visitor.context.close()
