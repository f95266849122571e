"""langchain: OpenAIEmbeddings(base_url=URL/v1, check_embedding_ctx_length=False), a store in
memory, ChatOpenAI; retrieval and answer over this server's endpoints alone."""

from __future__ import annotations

import os

import openai
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from tried import CORPUS, MODEL, QUESTIONS, URL, raised, spoken, tried

ENCODER, STATIC = os.environ["COTERIE_ENCODER"], "static"


def embeddings(model: str, **settings: object) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model=model,
        base_url=f"{URL}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
        max_retries=0,
        **settings,
    )


def try_retrieval(model: str) -> None:
    @tried(f"retrieval of the right document ({model})")
    def _() -> str:
        store = InMemoryVectorStore(embeddings(model))
        store.add_documents([Document(text) for text in CORPUS])
        for question, part in QUESTIONS.items():
            [best] = store.similarity_search(question, k=1)
            assert part in best.page_content, (question, best.page_content)
        return f"{len(QUESTIONS)} of {len(QUESTIONS)} questions"


try_retrieval(ENCODER)
try_retrieval(STATIC)


@tried("question answered from a document")
def _() -> str:
    store = InMemoryVectorStore(embeddings(ENCODER))
    store.add_documents([Document(text) for text in CORPUS])
    question = "Who keeps the lighthouse of Varn?"
    [best] = store.similarity_search(question, k=1)
    model = ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=40, temperature=0
    )
    prompt = f"{best.page_content}\n\nUsing only this text, answer: {question}"
    answer = spoken(model.invoke(prompt).content)
    assert "Odile" in answer, answer
    return answer[:60]


@tried("fewer dimensions")
def _() -> str:
    [vector] = embeddings(ENCODER, dimensions=64).embed_documents(["a text"])
    assert len(vector) == 64
    return "64"


@tried("too long")
def _() -> str:
    long = ["word " * 2000]
    error = raised(openai.BadRequestError, lambda: embeddings(ENCODER).embed_documents(long))
    return str(error.code)
