"""llama-index: OpenAILikeEmbedding and OpenAILike(api_base=URL/v1), a VectorStoreIndex in memory
and its query engine."""

from __future__ import annotations

import os

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from tried import CORPUS, MODEL, QUESTIONS, URL, spoken, tried

ENCODER = os.environ["COTERIE_ENCODER"]


def index(model: str) -> VectorStoreIndex:
    embedding = OpenAILikeEmbedding(model_name=model, api_base=f"{URL}/v1", api_key="none")
    documents = [Document(text=text) for text in CORPUS]
    # its default splitter fetches a tokenizer from the internet
    splitter = SentenceSplitter(chunk_size=128, chunk_overlap=0, tokenizer=str.split)
    return VectorStoreIndex.from_documents(
        documents, embed_model=embedding, transformations=[splitter]
    )


def try_retrieval(model: str) -> None:
    @tried(f"retrieval of the right document ({model})")
    def _() -> str:
        retriever = index(model).as_retriever(similarity_top_k=1)
        for question, part in QUESTIONS.items():
            [best] = retriever.retrieve(question)
            assert part in best.get_content(), (question, best.get_content())
        return f"{len(QUESTIONS)} of {len(QUESTIONS)} questions"


try_retrieval(ENCODER)
try_retrieval("static")


@tried("query engine")
def _() -> str:
    llm = OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=40,
        temperature=0, context_window=8192, tokenizer=None,
    )  # fmt: skip
    engine = index(ENCODER).as_query_engine(llm=llm, similarity_top_k=1)
    answer = engine.query("Who keeps the lighthouse of Varn?")
    assert "Odile" in answer.source_nodes[0].get_content()
    return spoken(str(answer))[:60]
