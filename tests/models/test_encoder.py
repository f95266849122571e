"""Encoders give the numbers of transformers, refuse what they cannot read, and cut nothing by
themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from coterie.core.errors import ContextLengthExceeded, InvalidRequest, WeightsError
from coterie.models.encoder.network import EncoderNetwork
from coterie.models.encoder.spec import read_encoder_spec
from coterie.models.encoder.tokens import FileTokenizer, InputTruncation, TextInput
from coterie.service.encoders.service import shaped
from coterie.workers.encoder.batches import BatchQueue, OpenJob
from tests.helpers.models.tiny import CORPUS
from tests.helpers.models.tiny_encoder import FAMILIES, TransformersEncoder, tiny_encoder

TOLERANCE = 1e-4


def network(path: Path) -> EncoderNetwork:
    return EncoderNetwork(read_encoder_spec(path), torch.device("cpu"), torch.float32)


def fresh_lists(seed: int, count: int = 40, longest: int = 128) -> list[list[int]]:
    draw = random.Random(seed)
    lists = [[draw.randrange(3, 300) for _ in range(draw.randint(1, 40))] for _ in range(count)]
    return [[5] * longest, [7], *lists, lists[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(family: str, tmp_path: Path) -> None:
    path = tiny_encoder(tmp_path / "m", family)
    ours, theirs = network(path), TransformersEncoder(path)
    lists = fresh_lists(random.randrange(10**9))
    found = ours.encode([np.asarray(item, np.int32) for item in lists])
    expected = theirs.mean(lists, normalise=False)
    assert found.shape == expected.shape == (len(lists), 48)
    assert np.abs(found - expected).max() < TOLERANCE
    assert np.abs(found[0] - found[1]).max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cross_encoder_is_exact(family: str, tmp_path: Path) -> None:
    path = tiny_encoder(tmp_path / "m", family, cross=True)
    spec = read_encoder_spec(path)
    assert spec.is_cross and spec.sigmoid
    ours, theirs = network(path), TransformersEncoder(path, cross=True)
    tokenizer = FileTokenizer(spec, spec.max_tokens)
    pairs = [("the quick fox", "jumps over"), ("a", "b c d e f"), ("what is the capital", "")]
    inputs = [TextInput(query, "documents", text) for query, text in pairs]
    tokens = list(tokenizer.encode(inputs, True, None))
    scores = ours.encode([item.ids for item in tokens], [item.split for item in tokens])[:, 0]
    expected = [torch.sigmoid(torch.tensor(theirs.logit(*pair))).item() for pair in pairs]
    assert np.abs(scores - expected).max() < TOLERANCE and len(set(scores.tolist())) == 3


def test_poolings_and_dense_layers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    modes = {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    path = tiny_encoder(tmp_path / "m", pooling=modes, normalise=False)
    weight = torch.randn(8, 96)
    (path / "2_Dense").mkdir()
    save_file({"linear.weight": weight.clone()}, path / "2_Dense" / "model.safetensors")
    facts = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (path / "2_Dense" / "config.json").write_text(json.dumps(facts))
    modules = json.loads((path / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "x.Dense"})
    (path / "modules.json").write_text(json.dumps(modules))
    lists = fresh_lists(3)
    hidden, mask = TransformersEncoder(path).hidden(lists)
    most = hidden.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)
    expected = torch.tanh(torch.cat([hidden[:, 0], most], 1) @ weight.T)
    found = network(path).encode([np.asarray(item, np.int32) for item in lists])
    assert np.abs(found - expected.numpy()).max() < TOLERANCE
    assert not read_encoder_spec(path).normalise


def test_a_text_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    ours = network(tiny_encoder(tmp_path / "m"))
    inputs = [np.asarray(item, np.int32) for item in fresh_lists(11)]
    together = ours.encode(inputs)
    alone = np.concatenate([ours.encode([item]) for item in inputs])
    assert np.abs(together - alone).max() < 1e-5


def test_nothing_is_cut_unasked(tmp_path: Path) -> None:
    path = tiny_encoder(tmp_path / "m")
    spec = read_encoder_spec(path)
    tokenizer = FileTokenizer(spec, spec.max_tokens)
    assert spec.max_tokens == 64
    long = TextInput("the fox " * 100, "input.7")
    with pytest.raises(ContextLengthExceeded, match=r"input\.7: 202 tokens .* limit of 64"):
        list(tokenizer.encode([long], True, None))
    with pytest.raises(ContextLengthExceeded, match="characters are too many"):
        list(tokenizer.encode([TextInput("x" * 200_000, "input")], True, None))
    whole = tokenizer.encode([TextInput("the fox " * 31, "input")], True, None)
    ids = next(whole).ids
    assert len(ids) == 64
    right = next(iter(tokenizer.encode([long], True, InputTruncation(10)))).ids
    left = next(iter(tokenizer.encode([long], True, InputTruncation(9, "left")))).ids
    assert right.tolist() == [*ids[:9], 2] and len(left) == 9
    # both ways end where the special tokens alone are too many, and leave no cut behind
    with pytest.raises(InvalidRequest):
        list(tokenizer.encode([long], True, InputTruncation(1)))
    with pytest.raises(ContextLengthExceeded):
        list(tokenizer.encode([long], True, None))
    with pytest.raises(InvalidRequest, match="has no tokens"):
        list(tokenizer.encode([TextInput("", "input")], False, None))


def test_a_cut_is_the_librarys_and_changes_no_shared_setting(tmp_path: Path) -> None:
    spec = read_encoder_spec(tiny_encoder(tmp_path / "m"))
    tokenizer = FileTokenizer(spec, spec.max_tokens)
    theirs = tokenizers.Tokenizer.from_file(str(spec.path / "tokenizer.json"))
    theirs.no_padding()
    words, chosen = " ".join(CORPUS).split(), random.Random(3)
    pairs = [
        tuple(" ".join(chosen.choices(words, k=chosen.randint(1, 9))) for _ in range(2))
        for _ in range(40)
    ]
    for first, second in pairs:
        for given in (None, second):
            most, side = chosen.randint(3, 24), chosen.choice(["left", "right"])
            theirs.enable_truncation(most, direction=side)
            expected = theirs.encode(first, given)
            item, cut = TextInput(first, "input", given), InputTruncation(most, side)
            found = next(iter(tokenizer.encode([item], True, cut)))
            assert found.ids.tolist() == expected.ids, (first, given, most, side)
    tokenizer._backend = _Unchangeable(tokenizer._backend)  # type: ignore[assignment]
    # other threads read it at the same time, for requests without a cut
    assert len(next(iter(tokenizer.encode([item], True, cut))).ids) <= most


class _Unchangeable:
    """A tokenizer whose settings cannot be changed."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        assert name not in ("enable_truncation", "no_truncation", "enable_padding"), name
        return getattr(self._backend, name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"model_type": "llama"}, "is no encoder here"),
        ("config.json", {"hidden_act": "mish"}, "activation 'mish'"),
        ("config.json", {"hidden_size": -4}, "no usable hidden"),
        ("config.json", {"num_attention_heads": 5}, "do not fit together"),
        ("config.json", {"is_decoder": True}, "absolute positions"),
        ("config.json", {"quantization_config": {"bits": 4}}, "quantised"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "this pooling"),
        ("1_Pooling/config.json", {"include_prompt": False}, "without the prompt"),
    ],
)
def test_a_directory_that_cannot_be_served_says_why(
    name: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tiny_encoder(tmp_path / "m")
    facts = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(facts | change))
    with pytest.raises(WeightsError, match=message):
        read_encoder_spec(path)


def test_a_classifier_of_several_labels_and_a_path_outside_are_refused(tmp_path: Path) -> None:
    path = tiny_encoder(tmp_path / "m", cross=True)
    facts = json.loads((path / "config.json").read_text())
    facts["id2label"] = {"0": "a", "1": "b"}
    (path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(WeightsError, match="2 labels"):
        read_encoder_spec(path)
    other = tiny_encoder(tmp_path / "n")
    modules = json.loads((other / "modules.json").read_text())
    modules[1]["path"] = "../m"
    (other / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(WeightsError, match="outside"):
        read_encoder_spec(other)


def test_owners_take_turns_in_batches() -> None:
    def job(name: str, owner: str, sizes: list[int]) -> OpenJob:
        return OpenJob(name, owner, [np.zeros(size, np.int32) for size in sizes], None, 1)

    queue = BatchQueue(batch_tokens=64)
    queue.add(job("large", "a", [4] * 200))
    queue.add(job("second", "a", [8]))
    queue.add(job("small", "b", [3, 5]))
    first = queue.take()
    assert [row.job.job_id for row in first] == ["large"] * 16
    queue.done(first, np.zeros((16, 1), np.float32))
    second = queue.take()
    assert {row.job.job_id for row in second} == {"small", "second", "large"}
    assert sum(len(row.job.inputs[row.index]) for row in second) <= 64
    done = queue.done(second, np.arange(len(second), dtype=np.float32)[:, None])
    assert {item.job_id for item in done} == {"small", "second"}
    queue.drop("large")
    assert not queue.take() and len(queue) == 0
    # one input larger than a batch runs by itself
    queue.add(job("wide", "a", [500, 2]))
    assert [len(row.job.inputs[row.index]) for row in queue.take()] == [2]
    assert [len(row.job.inputs[row.index]) for row in queue.take()] == [500]


def test_shapes_of_vectors() -> None:
    vectors = np.asarray([[3.0, 4.0, 12.0], [0.0, 0.0, 0.0]], np.float32)
    assert np.allclose(shaped(vectors, False, None), vectors)
    assert np.allclose(shaped(vectors, True, None)[0], np.asarray([3, 4, 12]) / 13)
    assert np.allclose(shaped(vectors, False, 2), [[0.6, 0.8], [0.0, 0.0]])
