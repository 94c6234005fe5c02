"""The HTTP completions on tiny-kimi: by plain requests, by the stock OpenAI client and by lm-eval. The scores are held to a prefill job's and to
the head that numpy applies to stored states."""
import http.client
import json
import socket
import struct
import threading
import time
import unittest
import urllib.error
import urllib.request

import numpy as np
import statetap
from served import LAYERS, MODEL, ROOT, Served
from statetap.checkpoint import HEAD, Checkpoint

try:
    import openai
except ImportError:
    openai = None
try:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
except ImportError:
    LocalCompletionsAPI = None

QUESTION = "What is the capital of France?"


def setUpModule():
    global served
    served = Served()
    served.__enter__()


def tearDownModule():
    served.__exit__()


def post(path, expect=200, **body):
    request = urllib.request.Request(f"http://{served.http}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, content = reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        status, content = error.code, json.load(error)
    assert status == expect, (status, content)
    return content


def complete(**body):
    return post("/v1/completions", **body)


def events(path, **body):
    """The data of a stream's events."""
    request = urllib.request.Request(f"http://{served.http}{path}", json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        lines = [line.decode().strip() for line in reply]
    data = [line[len("data: "):] for line in lines if line]
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(one) for one in data[:-1]]


def metric(name):
    with urllib.request.urlopen(f"http://{served.http}/metrics") as reply:
        return next(float(line.split()[-1]) for line in reply.read().decode().splitlines() if line.startswith(name + " "))


def ids_of(text):
    return post("/tokenize", prompt=text)["tokens"]


def answer(*arguments):
    """What `statetap ask` says."""
    return json.loads(served.cli("--json", "ask", QUESTION, *arguments).stdout)


class PlainTest(unittest.TestCase):
    def test_models(self):
        with urllib.request.urlopen(f"http://{served.http}/v1/models") as reply:
            (model,) = json.load(reply)["data"]
        self.assertEqual((model["id"], model["object"]), ("tiny-kimi", "model"))
        with urllib.request.urlopen(f"http://{served.http}/v1/models/tiny-kimi") as reply:
            self.assertEqual(json.load(reply), model)

    def test_a_chat_is_what_ask_answers(self):
        messages = [{"role": "user", "content": QUESTION}]
        for options, flags in (({"temperature": 0}, ["--temperature", "0"]), ({"seed": 5}, ["--seed", "5"]),
                               ({"seed": 5, "chat_template_kwargs": {"thinking": False}}, ["--seed", "5", "--thinking", "off"])):
            told = answer("--max-new-tokens", "40", *flags)
            reply = post("/v1/chat/completions", model="tiny-kimi", messages=messages, max_completion_tokens=40, **options)
            (choice,) = reply["choices"]
            message = choice["message"]
            whole = message["content"] if message["reasoning_content"] is None else f'{message["reasoning_content"]}</think>{message["content"]}'
            self.assertEqual(whole, told["text"])
            self.assertEqual(choice["finish_reason"], told["finish_reason"])
            self.assertEqual(reply["usage"], {"prompt_tokens": told["prompt_tokens"], "completion_tokens": told["tokens"],
                                              "total_tokens": told["prompt_tokens"] + told["tokens"]})
            self.assertEqual(reply["object"], "chat.completion")

    def test_a_thought_that_does_not_end_has_no_content(self):
        reply = post("/v1/chat/completions", messages=[{"role": "user", "content": QUESTION}], max_tokens=3, temperature=0)
        message = reply["choices"][0]["message"]
        self.assertIsNone(message["content"])
        self.assertTrue(message["reasoning_content"])
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")

    def test_tools_are_rendered(self):
        messages = [{"role": "user", "content": QUESTION}]
        tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
        plain = post("/tokenize", messages=messages)["tokens"]
        rendered = post("/tokenize", messages=messages, tools=[tool])["tokens"]
        self.assertIn("lookup", post("/detokenize", tokens=rendered)["prompt"])
        reply = post("/v1/chat/completions", messages=messages, tools=[tool], tool_choice="auto", max_tokens=1)
        self.assertEqual(reply["usage"]["prompt_tokens"], len(rendered))
        self.assertGreater(len(rendered), len(plain))

    def test_prompts_as_texts_and_as_ids(self):
        texts = ["The capital of France is", "Count to five:"]
        ids = [ids_of(text) for text in texts]
        options = {"temperature": 0, "max_tokens": 8}
        one = [complete(prompt=text, **options)["choices"][0]["text"] for text in texts]
        for prompts in (texts, ids):
            reply = complete(prompt=prompts, **options)
            self.assertEqual([choice["text"] for choice in reply["choices"]], one)
            self.assertEqual([choice["index"] for choice in reply["choices"]], [0, 1])
            self.assertEqual(reply["usage"]["prompt_tokens"], len(ids[0]) + len(ids[1]))
        self.assertEqual(complete(prompt=ids[0], **options)["choices"][0]["text"], one[0])
        self.assertEqual(complete(prompt=ids[0], echo=True, **options)["choices"][0]["text"], texts[0] + one[0])

    def test_a_special_token_in_a_raw_prompt_is_that_token(self):
        self.assertEqual(len(ids_of("<|im_end|>")), 1)
        self.assertEqual(complete(prompt="<|im_end|>", max_tokens=1)["usage"]["prompt_tokens"], 1)

    def test_equal_prompts_draw_apart_and_a_seed_repeats_them(self):
        def texts(**options):
            return [choice["text"] for choice in complete(prompt=["Tell me"] * 3, max_tokens=12, temperature=2, top_p=1, **options)["choices"]]
        self.assertEqual(len(set(texts(seed=1))), 3)
        self.assertEqual(texts(seed=1), texts(seed=1))
        self.assertNotEqual(texts(), texts())

    def test_a_stream_has_the_same_text_and_scores(self):
        body = {"prompt": "Count to five:", "temperature": 0, "max_tokens": 24, "logprobs": 1}
        whole = complete(**body)
        pieces = events("/v1/completions", **body, stream_options={"include_usage": True})
        self.assertEqual(pieces[-1]["usage"], whole["usage"])
        self.assertEqual(pieces[-1]["choices"], [])
        (choice,) = whole["choices"]
        parts = [piece["choices"][0] for piece in pieces[:-1]]
        self.assertGreater(len(parts), 3)
        self.assertEqual("".join(part["text"] for part in parts), choice["text"])
        self.assertEqual([part["finish_reason"] for part in parts], [None] * (len(parts) - 1) + [choice["finish_reason"]])
        for field in choice["logprobs"]:
            self.assertEqual(sum((part["logprobs"][field] for part in parts if part["logprobs"]), []), choice["logprobs"][field], field)

    def test_a_chat_stream_has_thought_and_content_apart(self):
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "logprobs": True, "top_logprobs": 1}
        (whole,) = post("/v1/chat/completions", **body)["choices"]
        deltas = [piece["choices"][0] for piece in events("/v1/chat/completions", **body)]
        self.assertEqual(deltas[0]["delta"]["role"], "assistant")
        for field in ("content", "reasoning_content"):
            self.assertEqual("".join(delta["delta"].get(field) or "" for delta in deltas), whole["message"][field])
        scores = sum((delta["logprobs"]["content"] for delta in deltas if delta["logprobs"]), [])
        self.assertEqual(scores, whole["logprobs"]["content"])
        for token in scores:  # greedy: each is the most likely
            self.assertEqual(token["top_logprobs"][0], {field: token[field] for field in ("token", "logprob", "bytes")})
            self.assertEqual(bytes(token["bytes"]).decode(errors="replace"), token["token"])

    def test_an_answer_ends_before_a_stop_string(self):
        body = {"prompt": "Count to five:", "temperature": 0, "max_tokens": 40}
        text = complete(**body)["choices"][0]["text"]
        stop = text[len(text) // 2:len(text) // 2 + 3]  # may begin and end inside tokens
        for reply in (complete(**body, stop=stop)["choices"][0], complete(**body, stop=["nowhere", stop])["choices"][0]):
            self.assertEqual(reply["text"], text[:text.index(stop)])
            self.assertEqual(reply["finish_reason"], "stop")
        pieces = events("/v1/completions", **body, stop=stop)
        self.assertEqual("".join(piece["choices"][0]["text"] for piece in pieces), text[:text.index(stop)])
        self.assertEqual(complete(**body, stop="nowhere")["choices"][0]["text"], text)

    def test_errors_name_field_value_and_remedy(self):
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body, param, words in (
                ("/v1/completions", {}, "prompt", "give a text"),
                ("/v1/completions", {"prompt": []}, "prompt", "[] is not possible"),
                ("/v1/completions", {"prompt": [[]]}, None, "no token"),
                ("/v1/completions", {"prompt": [1, 99999]}, "prompt", "0 to 2303"),
                ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "0 is not possible"),
                ("/v1/completions", {"prompt": "x", "logprobs": 5}, "logprobs", "5 is not possible"),
                ("/v1/completions", {"prompt": "x", "n": 2}, "n", "give 1"),
                ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature", "0 to 100"),
                ("/v1/completions", {"prompt": "x", "top_p": 0}, "top_p", "0 is not possible"),
                ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix", "leave it out"),
                ("/v1/completions", {"prompt": "x", "temprature": 1}, "temprature", "did you mean temperature?"),
                ("/v1/completions", {"prompt": "x", "stop": [""]}, "stop", "not empty"),
                ("/v1/completions", {"prompt": "x", "stream_options": {}}, "stream_options", "stream true"),
                ("/v1/completions", {"prompt": "x " * 9000}, None, "too_long"),
                ("/v1/chat/completions", {}, "messages", "list of messages"),
                ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "hi"}]}, None, "sample"),
                ("/v1/chat/completions", {**chat, "presence_penalty": 0.5}, "presence_penalty", "0.5 is not possible"),
                ("/v1/chat/completions", {**chat, "tool_choice": "none"}, "tool_choice", "auto"),
                ("/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}}, "response_format", "text"),
                ("/v1/chat/completions", {**chat, "top_logprobs": 1}, "top_logprobs", "logprobs true"),
                ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"think": True}}, "chat_template_kwargs.think", "thinking?")):
            error = post(path, expect=400, **body)["error"]
            self.assertEqual((error["type"], error["param"]), ("invalid_request_error", param), error)
            self.assertIn(words, error["message"])
        self.assertEqual(post("/v1/completions", expect=404, model="gpt-4", prompt="x")["error"]["code"], "model_not_found")
        self.assertIn("/v1/embeddings", post("/v1/embeddings", expect=404)["error"]["message"])
        # What is at its default may be said.
        post("/v1/chat/completions", **chat, max_tokens=1, n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, user="me", seed=None,
             response_format={"type": "text"}, stream=False)

    def test_a_body_that_is_too_large_is_refused(self):
        self.assertIn("fewer", post("/v1/completions", expect=413, prompt="x" * (9 << 20))["error"]["message"])

    def test_no_json(self):
        connection = http.client.HTTPConnection(served.http)
        connection.request("POST", "/v1/completions", b"{nope")
        reply = connection.getresponse()
        self.assertEqual(reply.status, 400)
        self.assertIn("no valid JSON", json.load(reply)["error"]["message"])
        connection.close()

    def test_a_client_that_goes_away_takes_nothing_from_others(self):
        before = metric('statetap_tokens_total{phase="answer"}')
        host, port = served.http.split(":")
        body = json.dumps({"prompt": "Tell me everything", "max_tokens": 4000, "temperature": 5, "top_p": 1, "stream": True}).encode()
        gone = []
        for _ in range(8):
            client = socket.create_connection((host, int(port)))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            gone.append(client)
        for client in gone:
            client.recv(1000)
            client.close()
        complete(prompt="Hi", max_tokens=4, temperature=0)
        while metric('statetap_answers{state="running"}') + metric('statetap_answers{state="waiting"}') > 0:
            time.sleep(0.1)
        self.assertLess(metric('statetap_tokens_total{phase="answer"}') - before, 8 * 1000)  # not 8 * 4000

    def test_a_stream_keeps_nobody_waiting(self):
        seen = threading.Event()
        def read():
            for piece in events("/v1/completions", prompt="Tell me everything", max_tokens=300, temperature=5, top_p=1):
                pass
            seen.set()
        reader = threading.Thread(target=read)
        reader.start()
        complete(prompt="Hi", max_tokens=1, temperature=0)
        self.assertFalse(seen.is_set())
        reader.join()


class ScoresTest(unittest.TestCase):
    """log p of given ids: three ways."""

    @classmethod
    def setUpClass(cls):
        lines = [json.loads(line) for line in (ROOT / "examples/prompts_64.jsonl").read_text().splitlines()[:6]]
        cls.ids = [ids_of(line["messages"][-1]["content"] * 3) for line in lines]
        cls.ids.append(ids_of("a long text, which takes more than one step of the engine. " * 60))
        assert len(cls.ids[-1]) > 512
        prompts = [{"id": str(i), "input_ids": ids} for i, ids in enumerate(cls.ids)]
        job = served.run(prompts, mode="prefill", logprobs=True)
        cls.stored = {s.id: s for s in served.client.stream([job])}

    def test_echo_gives_what_a_prefill_job_stores(self):
        for most in (0, 1):
            reply = complete(prompt=self.ids, max_tokens=most, echo=True, logprobs=1, temperature=0)
            self.assertEqual(reply["usage"]["completion_tokens"], most * len(self.ids))
            for i, (ids, choice) in enumerate(zip(self.ids, reply["choices"])):
                scores = choice["logprobs"]
                self.assertEqual([len(values) for values in scores.values()], [len(ids) + most] * 4)
                self.assertIsNone(scores["token_logprobs"][0])
                self.assertIsNone(scores["top_logprobs"][0])
                np.testing.assert_array_equal(np.float32(scores["token_logprobs"][1:len(ids)]), self.stored[str(i)].logprobs[1:])
                for name, score, best in list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"]))[1:]:
                    self.assertIn(name, best)
                    self.assertGreaterEqual(max(best.values()), score)
                text = post("/detokenize", tokens=ids)["prompt"]
                self.assertTrue(choice["text"].startswith(text))
                for name, offset in zip(scores["tokens"], scores["text_offset"]):
                    if not name.startswith("bytes:"):
                        self.assertEqual(text[offset:offset + len(name)] or name, name)

    def test_scores_are_the_heads_of_the_stored_states(self):
        checkpoint = Checkpoint(MODEL)
        head = statetap.float32(checkpoint.bits(HEAD))
        for i, ids in enumerate(self.ids[:3]):
            normed = statetap.float32(checkpoint.final_norm(self.stored[str(i)].states[LAYERS]))
            logits = (normed @ head.T).astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            scores = complete(prompt=ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
            ours = np.array(scores["token_logprobs"][1:])
            theirs = logp[np.arange(len(ids) - 1), ids[1:]]
            # The states were rounded to bf16.
            self.assertLess(np.abs(ours - theirs).max(), 0.05 * (1 + np.abs(theirs)).max())
            best = [max(one, key=one.get) for one in scores["top_logprobs"][1:]]
            agree = [name == post("/detokenize", tokens=[int(b)])["prompt"] for name, b in zip(best, logp.argmax(-1))]
            self.assertGreater(np.mean(agree), 0.9)


@unittest.skipUnless(openai, "no openai package here: pip install openai")
class OpenaiClientTest(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=f"http://{served.http}/v1", api_key="none", max_retries=0)

    def test_chat(self):
        self.assertEqual([model.id for model in self.client.models.list()], ["tiny-kimi"])
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        reply = self.client.chat.completions.create(model="tiny-kimi", messages=messages, temperature=0, logprobs=True, top_logprobs=1)
        choice = reply.choices[0]
        self.assertIn("Paris", choice.message.content)
        self.assertEqual(len(choice.logprobs.content), reply.usage.completion_tokens)
        text, usage = "", None
        for chunk in self.client.chat.completions.create(model="tiny-kimi", messages=messages, temperature=0, stream=True,
                                                         stream_options={"include_usage": True}):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        self.assertEqual((text, usage), (choice.message.content, reply.usage))

    def test_completions(self):
        reply = self.client.completions.create(model="tiny-kimi", prompt=["Count to five:", "One, two,"], max_tokens=6, temperature=0, logprobs=1)
        self.assertEqual(sum(len(choice.logprobs.token_logprobs) for choice in reply.choices), reply.usage.completion_tokens)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1])
        pieces = self.client.completions.create(model="tiny-kimi", prompt="Count to five:", max_tokens=6, temperature=0, stream=True)
        self.assertEqual("".join(piece.choices[0].text for piece in pieces), reply.choices[0].text)

    def test_errors(self):
        with self.assertRaises(openai.NotFoundError):
            self.client.completions.create(model="gpt-4", prompt="x")
        with self.assertRaises(openai.BadRequestError) as refused:
            self.client.completions.create(model="tiny-kimi", prompt="x", n=2)
        self.assertEqual(refused.exception.param, "n")


@unittest.skipUnless(LocalCompletionsAPI, "no lm-eval here: pip install 'lm-eval[api]'")
class LmEvalTest(unittest.TestCase):
    """Its own client, asking as for any benchmark: the server tokenizes, scores and answers."""

    def test_loglikelihood(self):
        pairs = [("The capital of France is", " Paris"), ("One, two, three,", " four"), ("The capital of France is", " a banana")]
        ids = [ids_of(context + continuation) for context, continuation in pairs]
        job = served.run([{"id": str(i), "input_ids": one} for i, one in enumerate(ids)], mode="prefill", logprobs=True)
        stored = {s.id: s.logprobs for s in served.client.stream([job])}
        for concurrent in (1, 3):
            lm = LocalCompletionsAPI(model="tiny-kimi", base_url=f"http://{served.http}/v1/completions", num_concurrent=concurrent)
            self.assertEqual(lm.tokenizer_backend, "remote")
            requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]
            for i, ((context, _), (score, greedy)) in enumerate(zip(pairs, lm.loglikelihood(requests))):
                tail = stored[str(i)][len(ids_of(context)):]
                self.assertAlmostEqual(score, float(tail.astype(np.float64).sum()), delta=1e-6)
                best = complete(prompt=ids[i], max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
                self.assertEqual(greedy, all(score == max(top.values()) for score, top in
                                             list(zip(best["token_logprobs"], best["top_logprobs"]))[len(ids_of(context)):]))

    def test_generation(self):
        lm = LocalCompletionsAPI(model="tiny-kimi", base_url=f"http://{served.http}/v1/completions")
        request = Instance(request_type="generate_until", doc={}, arguments=("Count to five:", {"until": ["\n"], "max_gen_toks": 16}), idx=0)
        (text,) = lm.generate_until([request])
        expected = complete(prompt="Count to five:", max_tokens=16, temperature=0, stop=["\n"])["choices"][0]["text"]
        self.assertEqual(text, expected)


if __name__ == "__main__":
    unittest.main()
