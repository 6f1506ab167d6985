"""Scores, ranks and classes over plain HTTP, in vLLM's shapes.

HOLOBIONT_URL as in test_openai.py; SmolLM2 with the adapter pirate is enough.
"""

import math
import os

import httpx
import pytest

from test_openai import base, client  # noqa: F401 (fixtures)

QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of France is Paris.", "Reranking is fun!", "Bread is made of flour, water and salt."]


@pytest.fixture(scope="session")
def post():
    url = os.environ["HOLOBIONT_URL"].rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {os.environ.get('HOLOBIONT_API_KEY', 'none')}"}
    with httpx.Client(base_url=url, headers=headers, timeout=300) as http:
        yield lambda route, **body: http.post(route, json=body)


def test_scores_are_the_cosines_of_the_embeddings(client, base, post):
    vectors = [item.embedding for item in client.embeddings.create(model=base, input=[QUERY, *DOCUMENTS]).data]
    cosines = [sum(a * b for a, b in zip(vectors[0], vector)) for vector in vectors[1:]]
    answer = post("/v1/score", model=base, text_1=QUERY, text_2=DOCUMENTS).json()
    scores = [item["score"] for item in answer["data"]]
    assert all(math.isclose(score, cosine, abs_tol=1e-5) for score, cosine in zip(scores, cosines)), (scores, cosines)
    ranked = post("/v1/rerank", model=base, query=QUERY, documents=DOCUMENTS, top_n=2).json()
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [result["index"] for result in ranked["results"]] == best
    assert [result["relevance_score"] for result in ranked["results"]] == [scores[index] for index in best]
    assert ranked["results"][0]["document"] == {"text": DOCUMENTS[best[0]]}


@pytest.mark.parametrize("model", ["base", "pirate"])
def test_a_token_score_is_the_probability_among_the_next_tokens(base, post, model):
    model = base if model == "base" else model
    template = "Is it true that {document} answers {query} Answer:"
    options = {"classifier_from_token": [" No", " Yes"], "template": template}
    answer = post("/v1/score", model=model, text_1=QUERY, text_2=DOCUMENTS, **options).json()
    no, yes = (token_ids(post, model, text)[0] for text in (" No", " Yes"))
    for item, document in zip(answer["data"], DOCUMENTS):
        prompt = token_ids(post, model, template.replace("{document}", document).replace("{query}", QUERY))
        difference = logprob(post, model, [*prompt, no]) - logprob(post, model, [*prompt, yes])
        assert math.isclose(item["score"], 1 / (1 + math.exp(difference)), abs_tol=1e-4), (item, difference)


def token_ids(post, model, text):
    """The tokens of a text alone."""
    return post("/tokenize", model=model, prompt=text, add_special_tokens=False).json()["tokens"]


def logprob(post, model, tokens):
    """The log-probability of the last token after the others."""
    answer = post("/v1/completions", model=model, prompt=tokens, max_tokens=0, prompt_logprobs=0).json()
    return answer["choices"][0]["prompt_logprobs"][-1][str(tokens[-1])]["logprob"]


def test_classes_are_those_of_the_request(base, post):
    answer = post("/v1/classify", model=base, input=["Water is wet", "Two and two"], classifier_from_token=[" is", " are", " and"]).json()
    for index, item in enumerate(answer["data"]):
        assert (item["index"], item["num_classes"]) == (index, 3)
        assert math.isclose(sum(item["probs"]), 1, abs_tol=1e-6)
        assert item["label"] == [" is", " are", " and"][item["probs"].index(max(item["probs"]))]
    refused = post("/v1/classify", model=base, input="Water")
    assert refused.status_code == 400 and "SEQ_CLS" in refused.json()["error"]["message"]
