"""Bodies of the encoders' endpoints: OpenAI's embeddings, the rerank of Jina and Cohere, vLLM's
score.

Only types and ranges. Unknown fields that would change the answer are refused, the others are
ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from coterie.api.body import RequestBody
from coterie.api.openai.types import TokenId

INT64 = 2**63 - 1
Ids = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]

# field -> what to do instead; they would change the vectors or their form
REFUSED = {
    "messages": "only text can be embedded: use input",
    "chat_template": "only text can be embedded: use input",
    "task": "this server's encoders know no tasks; put an instruction into the text",
    "input_type": "this server's encoders know no types of input; put an instruction into the text",
    "instruction": "put it into the text",
    "prompt_name": "put the prompt into the text",
    "late_chunking": "is not available",
    "embedding_type": "use encoding_format",
    "embedding_types": "use encoding_format",
    "embed_dtype": "vectors are float32",
    "output_dtype": "vectors are float32",
    "output_dimension": "use dimensions",
    "endianness": "numbers are little-endian",
    "return_multivector": "is not available",
    "normalized": "vectors are as the model's files say",
    "normalize": "vectors are as the model's files say",
    "rank_fields": "join the fields into one text",
    "max_chunks_per_doc": "a document is one text; split it",
    "max_chars_per_doc": "a document is one text; split it",
    "images": "only text can be read here",
    "mm_processor_kwargs": "only text can be read here",
}
# values that change nothing
UNCHANGED: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "output_dtype": ("float", "float32"),
    "endianness": ("native", "little"),
    "embedding_type": ("float",),
    "embedding_types": (["float"],),
    "normalized": (True,),
    "normalize": (True,),
    "rank_fields": (["text"],),
    "max_chunks_per_doc": (1,),
}


class EncodeFields(RequestBody):
    """Fields of all three endpoints. Inputs that are too long are refused unless one of the
    `truncate` fields asks for a cut."""

    model_config = ConfigDict(extra="allow")

    user: str | None = None
    # vLLM: the tokens that are kept, -1 = as many as the model reads
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT64)
    truncation_side: Literal["left", "right"] | None = None
    # Jina and TEI: a flag; Cohere: which end is cut
    truncate: bool | Literal["NONE", "START", "END"] | None = None


class EmbeddingBody(EncodeFields):
    """`input`: a text, a list of texts, token ids, or a list of lists of token ids."""

    model: str = Field(min_length=1, max_length=512)
    input: str | Ids | Texts | Annotated[list[Ids], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT64)
    add_special_tokens: bool | None = None


class TextDocument(RequestBody):
    """A document as an object; other fields come back as they are."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankBody(EncodeFields):
    """Without `model` the first encoder ranks; a cross-encoder before the others."""

    model: str | None = Field(None, min_length=1, max_length=512)
    query: str | TextDocument
    documents: Annotated[list[str | TextDocument], Field(min_length=1)]
    top_n: int | None = Field(None, ge=1, le=INT64)
    return_documents: bool | None = None
    # Cohere: tokens of a document that are kept
    max_tokens_per_doc: int | None = Field(None, ge=1, le=INT64)


class ScoreBody(EncodeFields):
    """Pairs of texts: one with one, one with many, or as many on both sides. `queries` and
    `documents` are other names of `text_1` and `text_2`."""

    model: str | None = Field(None, min_length=1, max_length=512)
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
